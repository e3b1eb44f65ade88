// What stands where, and what happens when.

const LISTED = 100000;  // items of the token list: a browser cannot make an element of any height
const $ = (id) => document.getElementById(id);

async function main() {
  const data = await readData($("data").textContent);
  $("data").remove();
  const columns = tokenColumns(data);
  const marked = new Set();
  const state = { what: "rows", order: [], descending: { rows: true, tokens: true } };

  document.title = `${data.about.data} · deftune inspect`;
  $("source").append(element("b", {}, visible(data.about.model)), " reads ", element("b", {}, visible(data.about.data)),
    ` · ${number(data.numRows)} rows · ${number(data.numTokens)} tokens`);
  $("overview").append(...overview(data));

  const reader = new Reader(data, columns, $("row"), $("details"), () => {
    document.body.classList.remove("reading");
    $("list").focus();
  });

  const list = new VirtualList($("list"), {
    itemHeight: 74,
    render: (index) => (state.what === "rows" ? rowItem : tokenItem)(data, state.order[index], sortKey(), marked),
    onChoose: (index, byHand) => {
      const chosen = state.order[index];
      if (state.what === "rows") reader.show(chosen, scoreOf(data, sortKey()));
      else reader.show(rowOfToken(data, chosen), scoreOf(data, null), chosen);
      if (byHand) document.body.classList.add("reading");
    },
    onEnter: () => { document.body.classList.add("reading"); reader.focus(); },
  });

  // --- ranking

  const options = {
    rows: data.scores.map((score) => ({ ...score, of: (row) => data.arrays[`score:${score.name}`][row] })),
    tokens: columns,
  };
  options.rows.push({ name: "place", label: "place in the data", of: (row) => data.arrays.row[row], ascending: true });
  const chosenSort = { rows: 0, tokens: 0 };
  const sortKey = () => options[state.what][chosenSort[state.what]];

  function rank() {
    const query = $("search").value.trim();
    const rows = state.what === "rows";
    const key = sortKey();
    const format = (token) => data.arrays.format[token];  // end and format tokens say nothing about a label
    let order = rows ? orderBy(data.numRows, key.of, state.descending.rows)
      : orderBy(data.numTokens, key.of, state.descending.tokens, format);
    if (query) order = order.filter((rows ? rowMatcher : tokenMatcher)(data, query));
    const found = order.length;
    state.order = rows ? order : order.subarray(0, LISTED);
    list.reset(state.order.length);
    reader.mark(query);
    const all = number(rows ? data.numRows : data.numTokens);
    $("count").textContent = (query ? `${number(found)} of ${all} ${state.what}` : `${all} ${state.what}`)
      + (state.order.length < found ? `, the first ${number(LISTED)} listed` : "");
    $("direction").textContent = state.descending[state.what] ? "↓" : "↑";
    if (found) list.choose(0);
  }

  function switchTo(what) {
    state.what = what;
    for (const name of ["rows", "tokens"]) {
      $(`tab-${name}`).setAttribute("aria-selected", name === what);
      $(`tab-${name}`).tabIndex = name === what ? 0 : -1;
    }
    $("sort").replaceChildren(...options[what].map((option, i) => element("option", { value: i }, option.label)));
    $("sort").value = chosenSort[what];
    $("search").placeholder = what === "rows" ? "Search the text  ( / )" : "Search tokens  ( / )";
    rank();
  }

  for (const name of ["rows", "tokens"]) {
    $(`tab-${name}`).addEventListener("click", () => switchTo(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      switchTo(name === "rows" ? "tokens" : "rows");
      $(`tab-${state.what}`).focus();
    });
  }
  $("sort").addEventListener("change", () => {
    chosenSort[state.what] = Number($("sort").value);
    state.descending[state.what] = !sortKey().ascending;
    rank();
  });
  $("direction").addEventListener("click", () => { state.descending[state.what] = !state.descending[state.what]; rank(); });
  let typing;
  $("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(rank, 80); });

  // --- colour

  $("colour").append(...columns.map((column, i) => element("option", { value: i }, column.label)));
  const recolour = () => {
    const column = columns[Number($("colour").value)];
    reader.recolour(column);
    $("legend").replaceChildren(...legend(data, column));
    $("legend").setAttribute("aria-label", `${column.label}: from 0 to ${number(column.top)}`);
    $("about-colour").textContent = column.about;
  };
  $("colour").addEventListener("change", recolour);
  $("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
      || (document.documentElement.style.colorScheme === "" && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.style.colorScheme = dark ? "light" : "dark";
  });

  // --- links to a row, and marked rows

  function openLink() {
    const wanted = /^#row=(\d+)$/.exec(location.hash);
    const row = wanted ? data.arrays.row.indexOf(Number(wanted[1]) - 1) : -1;
    if (row < 0) return;
    $("search").value = "";
    switchTo("rows");
    list.choose(state.order.indexOf(row), true);
  }
  addEventListener("hashchange", openLink);

  reader.onShow = () => { $("mark").checked = marked.has(reader.row); };
  function mark(on) {
    if (on) marked.add(reader.row); else marked.delete(reader.row);
    reader.onShow();
    $("marked").hidden = !marked.size;
    $("marked-count").textContent = `${number(marked.size)} marked`;
    list.redraw();
  }
  const chosenMarks = () => [...marked].sort((a, b) => a - b);
  $("mark").addEventListener("change", () => mark($("mark").checked));
  $("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(chosenMarks().map((row) => data.rows[row].where).join("\n"));
    $("marked-count").textContent = `${number(marked.size)} copied`;
  });
  $("download").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([rowLines(data, chosenMarks())], { type: "application/jsonl" }));
    element("a", { href: url, download: "marked.jsonl" }).click();
    URL.revokeObjectURL(url);
  });

  // --- keys that work everywhere

  $("help-open").addEventListener("click", () => $("help").showModal());
  $("back").addEventListener("click", () => { document.body.classList.remove("reading"); $("list").focus(); });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const writing = event.target === $("search");
    if (event.key === "Escape" && writing) {
      $("search").value = "";
      rank();
      $("list").focus();
    } else if (event.key === "Enter" && writing) {
      $("list").focus();
    } else if (event.key === "/" && !writing) {
      event.preventDefault();
      document.body.classList.remove("reading");
      $("search").focus();
      $("search").select();
    } else if (event.key === "m" && !event.target.matches("#search, select")) {
      mark(!marked.has(reader.row));
    } else if (event.key === "?" && !writing) {
      $("help").showModal();
    } else if (event.key === "Escape") {
      document.body.classList.remove("reading");
      $("list").focus();
    }
  });

  switchTo("rows");
  recolour();
  $("list").focus();
  openLink();
  document.documentElement.dataset.ready = performance.now().toFixed(0);  // milliseconds since the page was opened
}

// --- pieces

function overview(data) {
  const { summary } = data;
  const most = Math.max(...data.objectives.map((objective) => objective.share)) || 1;
  const tile = (value, label, title) =>
    element("div", { class: "tile", title }, element("b", {}, value), element("span", {}, label));
  const shares = data.objectives.map(({ name, share, rgb }) => element("div", {},
    element("span", {}, name), meter(share / most, rgb, `${name}: ${percent(share)}`), element("b", {}, percent(share))));
  return [
    tile(number(summary.conflicts),
      `confident conflicts, ${percent(summary.conflicts / data.numTokens)} of the tokens; `
        + `${number(summary.format_conflicts)} are end or format tokens`,
      `Tokens whose conflict is at least ${data.threshold}. Where end tokens are among them, an objective whose gate `
        + "is small there may not learn to stop: see eos(nll)"),
    tile(percent(summary.loss_share), "of the loss (NLL) sits on them",
      "Sum of -log p over conflicts, over the sum of all"),
    tile(number(summary.contradicted_answers),
      `rows whose stated answer the model contradicts, of ${number(summary.stated_answers)}`,
      "A confident conflict on a token of the answer: first candidates for a wrong label"),
    element("div", { class: "tile wide",
                     title: "Sum of gate (1 - p) over conflicts, over the sum of all tokens" },
      element("span", {}, `Share of each objective's gradient on conflicts (bars from 0 to ${percent(most)})`),
      element("div", { class: "objectives" }, ...shares)),
  ];
}

function scoreHead(left, value, share) {
  return [
    element("div", { class: "head" }, element("span", { class: "where" }, left), element("b", {}, value)),
    element("div", { class: "score" }, element("i", { style: { width: `${100 * share}%` } })),
  ];
}

function rowItem(data, row, key, marked) {
  const value = key.of(row);
  const token = causeOf(data, row, scoreOf(data, key));
  return [
    ...scoreHead((marked.has(row) ? "✓ " : "") + shortWhere(data.rows[row].where), number(value), level({ top: key.top ?? 1 }, value) || 0),
    element("div", { class: "snippet" }, ...snippet(data, token)),
    element("div", { class: "note" }, preference(data, token)),
  ];
}

function tokenItem(data, token, column) {
  const value = column.of(token);
  return [
    ...scoreHead(shortWhere(data.rows[rowOfToken(data, token)].where), number(value), level(column, value)),
    element("div", { class: "snippet" }, ...snippet(data, token, column)),
    element("div", { class: "note" }, preference(data, token)),
  ];
}

function preference(data, token) {
  const p = Math.exp(data.arrays.log_p[token]), otherP = Math.exp(data.arrays.other_log_p[token]);
  return `${quoted(tokenText(data, token))} ${number(p)} · model: ${quoted(otherText(data, token))} ${number(otherP)}`;
}

// The end of a long path says more than its beginning.
function shortWhere(where) {
  const parts = where.split("/");
  return visible(parts.length > 2 ? `…/${parts.slice(-1)}` : where);
}

// The colour scale, over how often each value occurs.
function legend(data, column) {
  const bins = new Array(36).fill(0);
  for (let i = 0, step = Math.max(1, Math.floor(data.numTokens / 50000)); i < data.numTokens; i += step) {
    bins[Math.min(35, Math.floor(36 * level(column, column.of(i))))]++;
  }
  const most = Math.max(...bins);
  const bars = bins.map((count, i) => element("i", { style: {
    height: `${count ? Math.max(8, 100 * Math.sqrt(count / most)) : 0}%`,
    backgroundColor: `rgb(${column.rgb.join(" ")} / ${(0.15 + 0.85 * (i + 0.5) / 36).toFixed(2)})`,
  } }));
  const top = number(column.top) + (column.unit ? "" : "+");
  return [element("span", {}, "0"), element("div", { class: "bins" }, ...bars), element("span", {}, top)];
}

main().catch((error) => {
  document.body.replaceChildren(element("p", { class: "failure" },
    `This page could not be shown: ${error.message}. It needs a browser of 2024 or newer.`));
  throw error;
});
