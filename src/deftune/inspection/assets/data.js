"use strict";
// The table behind the page: base64 of gzip of a length, a JSON head, and the typed arrays that the head names.
// Whatever a dataset says is inside that, so nothing of it is ever parsed as HTML; it is shown as text nodes only.

const ARRAYS = { f4: Float32Array, u4: Uint32Array };

async function readData(base64) {
  const binary = atob(base64);
  const packed = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) packed[i] = binary.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const headBytes = new DataView(buffer).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headBytes)));
  data.arrays = {};
  let at = 4 + headBytes;
  for (const [name, type, length] of data.layout) {
    data.arrays[name] = new ARRAYS[type](buffer, at, length);
    at += 4 * length;
  }
  data.numRows = data.arrays.start.length - 1;
  data.numTokens = data.arrays.start[data.numRows];
  return data;
}

// A column of numbers, one per token: what tokens are coloured and ranked by.
function tokenColumns(data) {
  const { arrays } = data;
  return data.columns.map((column) => {
    const source = arrays[column.array];
    let of = (i) => source[i];
    if (column.derive === "exp") of = (i) => Math.exp(source[i]);
    if (column.derive === "negative") of = (i) => -source[i];
    if (column.derive === "signal") of = (i) => source[i] * -Math.expm1(arrays.log_p[i]);
    return { ...column, of, top: column.unit ? 1 : highest(of, data.numTokens) };
  });
}

// The 99th percentile of a sample: one absurd token must not make all others look alike.
function highest(of, count) {
  const sample = [];
  for (let i = 0, step = Math.max(1, Math.floor(count / 20000)); i < count; i += step) sample.push(of(i));
  sample.sort((a, b) => a - b);
  return sample[Math.floor(0.99 * (sample.length - 1))] || 1;
}

// 0..1 of a column's scale; ranks by their logarithm.
function level(column, value) {
  const share = column.log ? Math.log1p(value) / Math.log1p(column.top) : value / column.top;
  return Math.min(1, Math.max(0, share));
}

// The score that a ranking of rows is by; of one that is by no score (the place in the data) the page's first.
function scoreOf(data, key) {
  return data.scores.find((score) => score.name === key?.name) ?? data.scores[0];
}

// The token that contributes most to a row's score: what is shown beside the score is what the score comes from.
function causeOf(data, row, score) {
  return data.arrays[`cause:${score.name}`][row];
}

function rowOfToken(data, token) {
  const { start } = data.arrays;
  let low = 0, high = data.numRows - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (start[middle] <= token) low = middle; else high = middle - 1;
  }
  return low;
}

const tokenText = (data, token) => data.strings[data.arrays.text[token]];
const otherText = (data, token) => data.strings[data.arrays.other[token]];

// A row's answer; the text is joined on first use.
function answerText(data, row) {
  let text = "";
  for (let i = data.arrays.start[row]; i < data.arrays.start[row + 1]; i++) text += tokenText(data, i);
  return text;
}

// Rows are counted from 1 in links, as lines are.
const rowLink = (data, row) => `#row=${data.arrays.row[row] + 1}`;

// The rows as JSONL, one object a line.
function rowLines(data, rows) {
  return rows.map((row) => JSON.stringify({ row: data.arrays.row[row] + 1, where: data.rows[row].where,
    prompt: data.rows[row].prompt, answer: answerText(data, row) }) + "\n").join("");
}

// The indices of `count` things by a key; what is `last`, and what has no value, comes last either way.
function orderBy(count, key, descending, last = () => 0) {
  const keys = Float64Array.from({ length: count }, (_, i) => key(i));
  const sign = descending ? -1 : 1;
  return Uint32Array.from(keys.keys()).sort((a, b) =>
    last(a) - last(b) || Number.isNaN(keys[a]) - Number.isNaN(keys[b]) || sign * (keys[a] - keys[b]) || a - b);
}

function rowMatcher(data, query) {
  const wanted = query.toLowerCase();
  data.haystack ??= data.rows.map((row, i) =>
    [row.where, row.prompt, ...row.between.flat(), answerText(data, i)].join("\n").toLowerCase());
  return (row) => data.haystack[row].includes(wanted);
}

function tokenMatcher(data, query) {
  const wanted = query.toLowerCase();
  const hits = data.strings.map((text) => text.toLowerCase().includes(wanted));
  return (token) => hits[data.arrays.text[token]] || hits[data.arrays.other[token]];
}
