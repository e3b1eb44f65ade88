// Elements, numbers, and a list of any length of which only what is in sight exists.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function number(value) {
  if (Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (Math.abs(value) >= 100) return value.toFixed(0);
  const short = Number(value.toPrecision(3));
  return Math.abs(short) >= 0.0001 ? String(short) : value.toExponential(1);
}

function percent(share) {
  if (share > 0.0995 || share === 0) return `${(100 * share).toFixed(0)}%`;
  return share < 0.0005 ? "< 0.1%" : `${(100 * share).toFixed(1)}%`;
}

// What cannot be seen is spelled out: control and format characters could otherwise hide or reorder text.
function visible(text) {
  return text.replace(/[^\n\t\P{C}]|[\u2028\u2029]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

// A token by itself, its spaces and breaks marked.
function quoted(text) {
  return `“${visible(text).replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥")}”`;
}

// A listbox of items of equal height. `render(index)` makes an item's children; the chosen one is announced by id.
class VirtualList {
  constructor(box, { itemHeight, render, onChoose, onEnter }) {
    Object.assign(this, { box, itemHeight, render, onChoose, onEnter, count: 0, chosen: -1, shown: new Map() });
    this.sizer = element("div", { class: "sizer", role: "presentation" });
    box.append(this.sizer);
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
    box.addEventListener("click", (event) => {
      const item = event.target.closest("[role=option]");
      if (item) this.choose(Number(item.dataset.index), true);
    });
    box.addEventListener("keydown", (event) => this.key(event));
  }

  reset(count) {
    this.count = count;
    this.chosen = -1;
    this.sizer.style.height = `${count * this.itemHeight}px`;
    this.box.scrollTop = 0;
    this.redraw();
  }

  redraw() {
    this.sizer.replaceChildren();
    this.shown.clear();
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.itemHeight) - 4);
    const last = Math.min(this.count, first + Math.ceil(this.box.clientHeight / this.itemHeight) + 8);
    for (const [index, item] of this.shown) {
      if (index < first || index >= last) { item.remove(); this.shown.delete(index); }
    }
    for (let index = first; index < last; index++) {
      if (this.shown.has(index)) continue;
      const item = element("div", {
        role: "option", id: `item-${index}`, "data-index": index, "aria-setsize": this.count,
        "aria-posinset": index + 1, "aria-selected": index === this.chosen,
        style: { transform: `translateY(${index * this.itemHeight}px)`, height: `${this.itemHeight}px` },
      }, ...this.render(index));
      this.shown.set(index, item);
      this.sizer.append(item);
    }
  }

  choose(index, byHand = false) {
    if (index < 0 || index >= this.count) return;
    this.shown.get(this.chosen)?.setAttribute("aria-selected", "false");
    this.chosen = index;
    const top = index * this.itemHeight, bottom = top + this.itemHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (bottom > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = bottom - this.box.clientHeight;
    this.draw();
    this.shown.get(index)?.setAttribute("aria-selected", "true");
    this.box.setAttribute("aria-activedescendant", `item-${index}`);
    this.onChoose(index, byHand);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.itemHeight) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.count, End: this.count };
    if (event.key in steps) {
      event.preventDefault();
      this.choose(Math.min(this.count - 1, Math.max(0, this.chosen + steps[event.key])));
    } else if (event.key === "Enter" || event.key === "ArrowRight") {
      event.preventDefault();
      this.onEnter();
    }
  }
}
