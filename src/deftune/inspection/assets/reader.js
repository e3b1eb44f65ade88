// One row as it reads, its tokens coloured by a column, and what is known of the chosen token.

const STRONGEST = 0.6;  // opacity of a token's colour at the top of the scale: the text on it stays readable

function shade(column, value) {
  return `rgb(${column.rgb.join(" ")} / ${(STRONGEST * level(column, value)).toFixed(3)})`;
}

function tokenSpan(data, token, column) {
  const text = tokenText(data, token);
  const conflict = data.arrays.conflict[token] >= data.threshold;
  const span = element("span", { class: conflict ? "token conflict" : "token" }, visible(text));
  if (text.includes("\n")) span.classList.add("breaks");
  if (text === "") span.classList.add("empty");
  if (text.trim() === "") span.setAttribute("aria-label", text === "" ? "no text" : quoted(text));
  if (column) span.style.backgroundColor = shade(column, column.of(token));
  return span;
}

// Some tokens around one, for a list: text before, the token, text after.
function snippet(data, token, column, before = 10, after = 8) {
  const { start } = data.arrays;
  const row = rowOfToken(data, token);
  const first = Math.max(start[row], token - before), last = Math.min(start[row + 1], token + after + 1);
  const join = (from, to) => {
    let text = "";
    for (let i = from; i < to; i++) text += tokenText(data, i);
    return visible(text).replace(/\s+/g, " ");
  };
  const middle = tokenSpan(data, token, column);
  middle.textContent = middle.textContent.replace(/\n/g, "↵") || "∅";
  middle.classList.remove("breaks", "empty");
  const mark = "\u200e";  // left-to-right: a space at the very end would be drawn at the other end
  return [
    element("span", { class: "left" }, element("bdi", {}, (first > start[row] ? "…" : "") + join(first, token) + mark)),
    middle,
    element("span", { class: "right" }, join(token + 1, last) + (last < start[row + 1] ? "…" : "")),
  ];
}

// Why the row stands where it does, first; then all else that speaks against it.
function rowReasons(data, row, score) {
  const { [score.name]: first, ...others } = data.rows[row].reasons;
  const value = data.arrays[`score:${score.name}`][row];
  const against = Object.keys(others).filter((name) => data.rows[row].flags.includes(name)).map((name) => others[name]);
  if (value === 0 && against.length) return against;  // a score of 0 speaks for the row
  return [first ?? `${score.label} ${number(value)}; most of it at ${preference(data, causeOf(data, row, score))}`,
    ...against];
}

class Reader {
  constructor(data, columns, place, details, onLeave) {
    Object.assign(this, { data, columns, place, details, onLeave, row: -1, token: -1, spans: [], query: "" });
    this.column = columns[0];
    place.addEventListener("click", (event) => {
      const span = event.target.closest(".token");
      if (span) this.choose(Number(span.dataset.token), true);
    });
    place.addEventListener("keydown", (event) => this.key(event));
  }

  first() { return this.data.arrays.start[this.row]; }
  last() { return this.data.arrays.start[this.row + 1] - 1; }

  // The row as `score` ranks it; `token` is chosen, unless given the one that the score comes from.
  show(row, score, token = causeOf(this.data, row, score)) {
    const { data } = this;
    const info = data.rows[row];
    this.row = row;
    this.token = -1;
    this.spans = [];
    const answer = element("div", { class: "answer", role: "listbox", "aria-label": "Answer, token by token",
                                    "aria-orientation": "horizontal" });
    const between = new Map(info.between);
    for (let i = this.first(); i <= this.last(); i++) {
      const span = tokenSpan(data, i, this.column);
      span.dataset.token = i;
      span.id = `token-${i}`;
      span.setAttribute("role", "option");
      span.tabIndex = -1;
      this.spans.push(span);
      const asked = between.get(i - this.first());
      if (asked !== undefined) answer.append(element("span", { class: "between" }, visible(asked)));
      answer.append(span);
    }
    const tiles = data.scores.map((score) => element("div", { title: score.about },
      element("dt", {}, score.label), element("dd", {}, number(data.arrays[`score:${score.name}`][row]))));
    const cut = info.truncated ? element("small", {}, ` ${number(info.truncated)} tokens cut off`) : "";
    this.place.replaceChildren(
      element("h2", {}, element("a", { href: rowLink(data, row), title: "Link to this row" }, visible(info.where)), cut),
      element("ul", { class: "reasons" }, ...rowReasons(data, row, score).map((reason) => element("li", {}, visible(reason)))),
      element("dl", { class: "scores" }, ...tiles),
      element("details", { open: "" }, element("summary", {}, "Prompt"), this.prompt(info.prompt)),
      element("h3", {}, "Answer"), answer);
    this.mark(this.query);
    this.choose(token);
    this.onShow?.();
  }

  // The template's own marks are dimmed.
  prompt(text) {
    const parts = visible(text).split(/(<\|[^|<>]*\|>)/);
    return element("div", { class: "prompt", role: "group", "aria-label": "Prompt", tabindex: 0 },
      ...parts.map((part, i) => (i % 2 ? element("span", { class: "mark" }, part) : part)));
  }

  recolour(column) {
    this.column = column;
    this.spans.forEach((span, i) => { span.style.backgroundColor = shade(column, column.of(this.first() + i)); });
  }

  // Outline the tokens that a search found in the answer.
  mark(query) {
    this.query = query;
    const wanted = query.toLowerCase();
    const text = wanted ? answerText(this.data, this.row).toLowerCase() : "";
    let at = wanted ? text.indexOf(wanted) : -1, offset = 0;
    this.spans.forEach((span, i) => {
      const end = offset + tokenText(this.data, this.first() + i).length;
      while (at >= 0 && at + wanted.length <= offset) at = text.indexOf(wanted, at + 1);
      span.classList.toggle("hit", at >= 0 && at < end && end > offset);
      offset = end;
    });
  }

  choose(token, focus = false) {
    const old = this.spans[this.token - this.first()];
    if (old) { old.tabIndex = -1; old.setAttribute("aria-selected", "false"); }
    this.token = token;
    const span = this.spans[token - this.first()];
    span.tabIndex = 0;
    span.setAttribute("aria-selected", "true");
    if (focus) span.focus({ preventScroll: true });
    span.scrollIntoView({ block: "nearest" });
    this.details.replaceChildren(...tokenDetails(this.data, token));
  }

  focus() { this.spans[this.token - this.first()]?.focus(); }

  key(event) {
    const goTo = (token) => {
      event.preventDefault();
      if (token >= this.first() && token <= this.last()) this.choose(token, true);
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !event.target.closest(".token")) return;
    if (event.key === "ArrowRight") goTo(this.token + 1);
    else if (event.key === "ArrowLeft") goTo(this.token - 1);
    else if (event.key === "ArrowDown") goTo(this.lineAway(1));
    else if (event.key === "ArrowUp") goTo(this.lineAway(-1));
    else if (event.key === "Home") goTo(this.first());
    else if (event.key === "End") goTo(this.last());
    else if (event.key === "n") goTo(this.nextConflict(1));
    else if (event.key === "p") goTo(this.nextConflict(-1));
    else if (event.key === "Escape") { event.stopPropagation(); this.onLeave(); }
  }

  nextConflict(step) {
    let token = this.token + step;
    while (token >= this.first() && token <= this.last()) {
      if (this.data.arrays.conflict[token] >= this.data.threshold) return token;
      token += step;
    }
    return this.token;
  }

  // The token on the next line that is nearest across.
  lineAway(step) {
    const boxes = (i) => this.spans[i].getClientRects()[0] ?? this.spans[i].getBoundingClientRect();
    const here = this.token - this.first(), from = boxes(here);
    let best = here, distance = Infinity, line = null;
    for (let i = here + step; i >= 0 && i < this.spans.length; i += step) {
      const box = boxes(i);
      if (Math.abs(box.top - from.top) < 4) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) >= 4) break;
      const away = Math.abs(box.left - from.left);
      if (away < distance) { best = i; distance = away; }
    }
    return best + this.first();
  }
}

function meter(share, rgb, label) {
  const width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return element("div", { class: "meter", role: "img", "aria-label": label },
    element("i", { style: { width, backgroundColor: `rgb(${rgb.join(" ")})` } }));
}

function tableRow(name, ...cells) {
  return element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((cell) => element("td", {}, cell)));
}

function tokenDetails(data, token) {
  const { arrays } = data;
  const p = Math.exp(arrays.log_p[token]), otherP = Math.exp(arrays.other_log_p[token]);
  const error = -Math.expm1(arrays.log_p[token]), concentration = arrays.concentration[token];
  const target = quoted(tokenText(data, token)), other = quoted(otherText(data, token));
  const conflict = arrays.conflict[token] >= data.threshold;
  const verdict = conflict ? `A confident conflict: the model expects ${other}.`
    : arrays.rank[token] === 0 ? "The token the model expects." : `The model would rather write ${other}.`;
  const gates = data.objectives.map(({ name, rgb }) => {
    const gate = arrays[`gate:${name}`][token];
    return tableRow(name, meter(gate, rgb, `gate ${number(gate)}`), number(gate), number(gate * error));
  });
  const facts = [
    ["conflict", number(arrays.conflict[token]), "How surely the model expects another token"],
    ["margin (nats)", number(arrays.margin[token]), "log q - log p: by how much it prefers another token"],
    ["NLL (nats)", number(-arrays.log_p[token]), "-log p"],
    ["rank", number(arrays.rank[token]), "How many tokens it finds likelier"],
    ["entropy (nats)", number(arrays.entropy[token]), "Of its distribution here"],
    ["concentration", `${number(concentration)} (${number(Number((1 / concentration).toPrecision(3)))} choices)`,
      "sum P²: DEFT's focus; its inverse is a number of equal choices"],
    ["position", number(arrays.position[token]), "In the sequence, the prompt included"],
  ];
  const heads = ["objective", "", "gate", "signal"].map((name) => element(name ? "th" : "td", name ? { scope: "col" } : {}, name));
  return [
    element("h2", {}, element("q", { class: "the-token" }, target.slice(1, -1) || "∅"), conflict ? element("em", {}, "conflict") : ""),
    element("p", {}, verdict),
    element("table", { class: "choices" },
      tableRow(target, meter(p, [0, 158, 115], `p ${number(p)}`), number(p)),
      tableRow(other, meter(otherP, [213, 94, 0], `p ${number(otherP)}`), number(otherP))),
    element("h3", {}, "Gate and signal of each objective"),
    element("table", { class: "gates" }, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...gates)),
    element("h3", {}, "Statistics of the token"),
    element("table", { class: "facts" }, ...facts.map(([name, value, title]) => {
      const row = tableRow(name, value);
      row.title = title;
      return row;
    })),
  ];
}
