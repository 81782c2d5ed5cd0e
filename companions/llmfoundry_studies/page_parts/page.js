// The list of items: filter, search, open. The data is the JSON in the element "data"; page_items.py describes it.
// Everything that comes from it is written as text, never as HTML, because it was written by other people.
"use strict";

const ITEMS_PER_PAGE = 50;
const OUTCOMES = [
  { key: "won", label: "Won", sign: "▲" },
  { key: "lost", label: "Lost", sign: "▼" },
  { key: "right", label: "Both right", sign: "●" },
  { key: "wrong", label: "Both wrong", sign: "○" },
  { key: "tied", label: "Equal", sign: "=" },
  { key: "unasked", label: "Not asked of both", sign: "–" },
];
// Control characters besides tab and line end, and characters that change the direction of text.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const OUTCOME_OF = Object.fromEntries(OUTCOMES.map((outcome) => [outcome.key, outcome]));

const { models, tasks } = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);

// One entry for each item, in the order of the list. `text` is what a search looks at, made when it is first needed.
const entries = [];
for (const task of tasks) {
  for (const item of task.items) {
    entries.push({ task, item, text: null, outcome: "" });
  }
}

// What is shown. It is kept in the address, so that a link leads to the same items.
const state = { first: 0, other: 1, task: "", outcome: "", search: "", page: 0, open: "" };
let shown = entries;

start();

function start() {
  fillSelect(element("task"), [["", `all ${tasks.length}`], ...tasks.map((task) => [task.name, task.name])]);
  for (const id of ["first", "other"]) {
    fillSelect(element(id), models.map((name, i) => [String(i), name]));
    element(id).addEventListener("change", (event) => change({ [id]: Number(event.target.value) }));
    element(`${id}-label`).hidden = models.length === 2;
  }
  element("filters").hidden = false;

  element("filters").addEventListener("submit", (event) => event.preventDefault());
  element("task").addEventListener("change", (event) => change({ task: event.target.value }));
  element("search").addEventListener("input", (event) => change({ search: event.target.value }));
  element("previous").addEventListener("click", () => turnPage(-1));
  element("next").addEventListener("click", () => turnPage(1));
  window.addEventListener("hashchange", readAddress);

  readAddress();
  document.documentElement.dataset.readyMs = performance.now().toFixed(0);
}

// ------------------------------------------------------------------------------------------------------------- state

// Reads the state from the address, such as #task=piqa/0-shot&outcome=won&open=piqa/0-shot:17. The names of the page's
// sections stand there too, and say nothing about the list.
function readAddress() {
  const hash = location.hash.slice(1);
  const isState = hash === "" || hash.includes("=");
  if (!isState && shown !== entries) return;
  const given = new URLSearchParams(isState ? hash : "");

  state.first = modelOf(given.get("first"), 0);
  state.other = modelOf(given.get("other"), 1);
  state.task = tasks.some((task) => task.name === given.get("task")) ? given.get("task") : "";
  state.outcome = Object.hasOwn(OUTCOME_OF, given.get("outcome")) ? given.get("outcome") : "";
  state.search = given.get("search") ?? "";
  state.page = Math.max(0, Math.floor(Number(given.get("page")) || 1) - 1);
  state.open = given.get("open") ?? "";

  element("task").value = state.task;
  element("first").value = String(state.first);
  element("other").value = String(state.other);
  element("search").value = state.search;
  filter();
  if (state.open && !given.has("page")) state.page = pageOfOpen();
  draw();
  if (state.open) document.querySelector(".item")?.parentElement.scrollIntoView({ block: "center" });
}

// Returns the number of a model that an address gives, or another number if it gives none.
function modelOf(text, otherwise) {
  const number = Number(text ?? otherwise);
  return Number.isInteger(number) && number >= 0 && number < models.length ? number : otherwise;
}

function writeAddress() {
  const given = new URLSearchParams();
  if (state.first !== 0) given.set("first", state.first);
  if (state.other !== 1) given.set("other", state.other);
  for (const key of ["task", "outcome", "search", "open"]) {
    if (state[key]) given.set(key, state[key]);
  }
  if (state.page > 0) given.set("page", state.page + 1);
  history.replaceState(null, "", `#${given}`);
}

function change(values) {
  Object.assign(state, { page: 0, open: "" }, values);
  filter();
  draw();
  writeAddress();
}

function turnPage(step) {
  state.page += step;
  state.open = "";
  draw();
  writeAddress();
  element("items").scrollIntoView();
}

function keyOf(entry) {
  return `${entry.task.name}:${entry.item.index}`;
}

function pageOfOpen() {
  const position = shown.findIndex((entry) => keyOf(entry) === state.open);
  return Math.max(0, Math.floor(position / ITEMS_PER_PAGE));
}

// ---------------------------------------------------------------------------------------------------------- filtering

// Finds the items that pass all filters, and counts the outcomes of those that pass all filters but that of outcomes.
function filter() {
  const started = performance.now();
  const words = state.search.toLowerCase().trim();
  const counts = Object.fromEntries(OUTCOMES.map((outcome) => [outcome.key, 0]));
  shown = [];
  for (const entry of entries) {
    if (state.task && entry.task.name !== state.task) continue;
    if (words && !textOf(entry).includes(words)) continue;
    entry.outcome = outcomeOf(entry);
    counts[entry.outcome] += 1;
    if (!state.outcome || entry.outcome === state.outcome) shown.push(entry);
  }
  drawOutcomes(counts);
  document.documentElement.dataset.filterMs = (performance.now() - started).toFixed(1);
}

function textOf(entry) {
  if (entry.text === null) {
    const { item } = entry;
    const texts = [item.question, item.category, ...(item.choices ?? []), ...(item.answers ?? []), ...(item.texts ?? [])];
    entry.text = texts.filter(Boolean).join("\n").toLowerCase();
  }
  return entry.text;
}

function outcomeOf(entry) {
  const first = entry.item.scores[state.first];
  const other = entry.item.scores[state.other];
  if (first === null || other === null) return "unasked";
  if (first === other) {
    if (entry.task.less_is_better || (first !== 0 && first !== 1)) return "tied";
    return first === 1 ? "right" : "wrong";
  }
  const isBetter = entry.task.less_is_better ? other < first : other > first;
  return isBetter ? "won" : "lost";
}

// ------------------------------------------------------------------------------------------------------------ drawing

function draw() {
  const numPages = Math.max(1, Math.ceil(shown.length / ITEMS_PER_PAGE));
  state.page = Math.min(state.page, numPages - 1);
  const begin = state.page * ITEMS_PER_PAGE;
  const visible = shown.slice(begin, begin + ITEMS_PER_PAGE);

  element("meaning").textContent =
    `Won: ${models[state.other]} is right and ${models[state.first]} is not, or it has fewer bits per byte. ` +
    "Lost: the other way round.";
  const range = visible.length ? `, ${count(begin + 1)} to ${count(begin + visible.length)} shown` : "";
  element("count").textContent = `${count(shown.length)} of ${count(entries.length)} items${range}`;
  element("list").replaceChildren(...visible.map(drawEntry));

  element("pages").hidden = numPages === 1;
  element("position").textContent = `page ${count(state.page + 1)} of ${count(numPages)}`;
  element("previous").disabled = state.page === 0;
  element("next").disabled = state.page === numPages - 1;
}

function drawOutcomes(counts) {
  const total = Object.values(counts).reduce((sum, number) => sum + number, 0);
  const buttons = [makeOutcomeButton("", "All", total)];
  // By bits per byte, no model is right or wrong.
  const hasAccuracies = tasks.some((task) => !task.less_is_better && (!state.task || task.name === state.task));
  for (const { key, label, sign } of OUTCOMES) {
    const isExpected = key === "won" || key === "lost" || (hasAccuracies && (key === "right" || key === "wrong"));
    if (!isExpected && counts[key] === 0 && state.outcome !== key) continue;
    buttons.push(makeOutcomeButton(key, `${sign} ${label}`, counts[key]));
  }
  // Buttons that exist already are kept, so that the one with the focus does not lose it.
  const group = element("outcomes");
  const existing = [...group.children];
  const isSame = existing.length === buttons.length && buttons.every((button, i) => button.value === existing[i].value);
  if (!isSame) {
    group.replaceChildren(...buttons);
    return;
  }
  buttons.forEach((button, i) => {
    existing[i].textContent = button.textContent;
    existing[i].setAttribute("aria-pressed", button.getAttribute("aria-pressed"));
  });
}

function makeOutcomeButton(key, label, number) {
  const button = make("button", key, `${label} ${count(number)}`);
  button.type = "button";
  button.value = key;
  button.setAttribute("aria-pressed", String(state.outcome === key));
  button.addEventListener("click", () => change({ outcome: key }));
  return button;
}

function drawEntry(entry) {
  const { key, label, sign } = OUTCOME_OF[entry.outcome];
  const isOpen = keyOf(entry) === state.open;
  const row = make("button", "row");
  row.type = "button";
  row.setAttribute("aria-expanded", String(isOpen));
  row.append(
    make("span", `outcome ${key}`, `${sign} ${label}`),
    make("span", "question", summaryOf(entry)),
    make("span", "task", entry.task.name),
    make("span", "index", count(entry.item.index + 1)),
  );

  const line = make("li");
  line.append(row);
  if (isOpen) line.append(drawItem(entry));
  row.addEventListener("click", () => toggle(entry, line, row));
  return line;
}

// Opens an item below its row, or closes it. Only one item is open, so that the address can name it.
function toggle(entry, line, row) {
  const wasOpen = state.open === keyOf(entry);
  for (const opened of element("list").querySelectorAll(".item")) {
    opened.previousElementSibling.setAttribute("aria-expanded", "false");
    opened.remove();
  }
  state.open = wasOpen ? "" : keyOf(entry);
  if (!wasOpen) {
    row.setAttribute("aria-expanded", "true");
    line.append(drawItem(entry));
  }
  writeAddress();
}

function summaryOf(entry) {
  const { item, task } = entry;
  if (item.question) return item.question.replace(/\s+/g, " ").slice(0, 300);
  if (task.is_text) {
    return `document ${count(item.index + 1)}: ${models.map((name, i) => `${name} ${format(item.scores[i], 4)}`).join(", ")}`;
  }
  return `row ${count(item.index + 1)}`;
}

// --------------------------------------------------------------------------------------------------------- one item

function drawItem(entry) {
  const { item, task } = entry;
  const box = make("div", "item");
  const addText = (heading, text) => box.append(make("h4", "", heading), make("p", "text", text));

  if (item.question) addText("question", item.question);
  if (item.category) addText("category", item.category);
  if (item.answers) addText("right answer", item.answers.join("\n"));
  if (item.texts) {
    item.texts.forEach((text, i) => addText(`${models[i]}, ${describeScore(item.scores[i])}`, text ?? "not asked"));
  }
  if (item.log_probabilities) {
    box.append(make("h4", "", describeNumbers(task)), drawChoices(item, task));
  }
  if (task.less_is_better || !(item.log_probabilities || item.texts)) {
    box.append(make("h4", "", task.label), drawScores(item, task));
  }
  item.prompts?.forEach((prompt, i) => {
    if (prompt === null || typeof prompt === "number") return;
    const names = models.filter((_, j) => j === i || item.prompts[j] === i);
    const heading = names.length === models.length ? "prompt" : `prompt of ${names.join(", ")}`;
    box.append(make("h4", "", `${heading}, divided into tokens; the answers are shaded`), ...drawPrompt(prompt));
  });
  if (!item.question && !task.is_text) {
    addText("not recorded", "The results have no question of this item. Newer evaluations record it.");
  }
  return box;
}

function describeNumbers(task) {
  const unit = task.unit ? `; below it per ${task.unit}, by which ${task.metric} chooses` : "";
  return `log-probability in nats${unit}`;
}

function describeScore(score) {
  if (score === null) return "not asked";
  if (score === 1) return "right";
  return score === 0 ? "wrong" : `score ${format(score, 3)}`;
}

// A row for each choice, a column for each model: the log-probability, what decides, and what was chosen.
function drawChoices(item, task) {
  const numChoices = Math.max(...item.log_probabilities.map((numbers) => numbers?.length ?? 0));
  const body = make("tbody");
  for (let choice = 0; choice < numChoices; choice++) {
    const isGold = choice === item.gold;
    const row = make("tr", isGold ? "gold" : "");
    const text = item.choices?.[choice] ?? (numChoices === 1 ? "answer" : `choice ${choice + 1}`);
    const name = make("th", "", text);
    name.scope = "row";
    if (isGold) name.append(make("span", "choice right", "✓ right answer"));
    row.append(name);
    models.forEach((_, model) => {
      const cell = drawChoice(item, model, choice, isGold);
      // Without a choice to make, the table would not show who was right.
      const isAlone = numChoices === 1 && !task.less_is_better;
      if (isAlone) cell.append(make("span", "choice right", describeScore(item.scores[model])));
      row.append(cell);
    });
    body.append(row);
  }
  return makeTable(["", ...models], body);
}

function drawChoice(item, model, choice, isGold) {
  const logProbability = item.log_probabilities[model]?.[choice];
  const cell = make("td", "number", format(logProbability, 2));
  const length = item.lengths?.[model]?.[choice];
  if (logProbability !== undefined && length) cell.append(make("small", "", format(logProbability / length, 3)));
  const isChosen = item.chosen?.[model] === choice;
  if (isChosen) cell.append(make("span", `choice ${isGold ? "won" : "lost"}`, isGold ? "✓ chosen" : "✗ chosen"));
  return cell;
}

// The context that all choices have in common, then the rest of each choice's context and its answer.
function drawPrompt(prompt) {
  const shared = make("p", "tokens");
  if (prompt.num_left_out) shared.append(make("em", "", `[${count(prompt.num_left_out)} tokens left out] `));
  shared.append(...prompt.shared.map((text) => drawToken(text, "")));
  const rests = prompt.answers.map((answer, choice) => {
    const rest = make("p", "tokens");
    rest.append(...prompt.contexts[choice].map((text) => drawToken(text, "")));
    rest.append(...answer.map((text) => drawToken(text, "answer")));
    return rest;
  });
  return [shared, ...rests.filter((rest) => rest.hasChildNodes())];
}

// A token has a line at its left border. An empty one is a part of the character that the next token completes.
function drawToken(text, className) {
  return make("span", className, text.replaceAll("\n", "⏎\n") || "\u200b");
}

function drawScores(item, task) {
  const row = make("tr");
  item.scores.forEach((score) => row.append(make("td", "number", format(score, task.less_is_better ? 4 : 3))));
  const body = make("tbody");
  body.append(row);
  return makeTable(models, body);
}

// ------------------------------------------------------------------------------------------------------------ helpers

function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = escapeControls(text);
  return made;
}

// Writes characters as escapes that would not be seen, or that reverse the order of those after them: "\u202e".
function escapeControls(text) {
  return text.replace(CONTROLS, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function makeTable(headings, body) {
  const row = make("tr");
  headings.forEach((heading, i) => row.append(make("th", i || headings.length === models.length ? "number" : "", heading)));
  const head = make("thead");
  head.append(row);
  const table = make("table");
  table.append(head, body);
  return table;
}

function fillSelect(select, options) {
  select.replaceChildren(...options.map(([value, label]) => new Option(escapeControls(label), value)));
}

function count(number) {
  return number.toLocaleString("en-US");
}

function format(number, digits) {
  if (number === null || number === undefined) return "–";
  return number.toFixed(digits).replace("-", "−");
}
