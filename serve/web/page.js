// The page: what is asked with which options, and what its buttons do.

import { Answer, promptElement } from "./answer.js";
import { serverInfo, stream } from "./api.js";
import { element } from "./element.js";
import { forget, keep, kept } from "./kept.js";

const $ = (id) => document.getElementById(id);
const options = $("options").elements;
const narrow = matchMedia("(max-width: 55rem)");
const touch = matchMedia("(hover: none)");
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

const TOOL = "tool:"; // before the name of a tool as a choice, which may be called "auto"
const INITIAL = JSON.stringify(settings());

// In the order of the page: {mode, turn, asked, place, answer, twins, shown}. A turn is what was said, as messages;
// `asked` how, as fields of the request and the system message. Twins are answers to the same, the last without MTP.
let exchanges = [];
let server = {}; // what it says of itself
let running = null; // an AbortController while an answer comes; its reason says why it ended

/** How to ask, by the settings. The seed is drawn here where none is given, so that it can be used again. */
function asked(mode, turn) {
  const fields = {
    stream: true,
    stream_options: { include_usage: true },
    return_token_origins: true,
    seed: crypto.getRandomValues(new Uint32Array(1))[0],
    speculative: { metrics: "summary" },
  };
  for (const name of NUMBERS) {
    if (options[name].value !== "") fields[name] = options[name].valueAsNumber;
  }
  if (!options.speculate.checked) fields.speculative.enabled = false;
  else if (options.depth.value !== "") fields.speculative.max_tokens = options.depth.valueAsNumber;
  if (mode === "text") return { fields, system: "" };
  if (options.thinking.checked) fields.thinking = { type: "enabled" }; // in the words of any template
  return { fields: { ...fields, ...toolFields(turn) }, system: options.system.value };
}

/** A tool is forced for what the user said, not for the results of calls, which would be followed by calls for ever. */
function toolFields(turn) {
  const given = tools();
  const choice = options.tool_choice.value;
  const answered = turn[0].role === "tool";
  if (!given || choice === "auto" || (answered && choice !== "none")) return { tools: given };
  if (choice === "none") return { tools: given, tool_choice: choice };
  const forced = choice === "required" ? choice : { type: "function", function: { name: nameOf(choice) } };
  return { tools: given, tool_choice: forced, parallel_tool_calls: false };
}

function requestBody(exchange, changed = {}) {
  const { fields, system } = exchange.asked;
  if (exchange.mode === "text") return { ...fields, ...changed, prompt: exchange.turn[0].content };
  const told = system.trim() ? [{ role: "system", content: system }] : [];
  return { ...fields, ...changed, messages: [...told, ...messages(exchange)] };
}

/** The tools that the model may call; undefined without any. Throws an Error for what is no list. */
function tools() {
  const text = options.tools.value.trim();
  const found = text ? JSON.parse(text) : undefined;
  if (found !== undefined && !Array.isArray(found)) throw new Error("this is no list");
  return found;
}

/** The conversation up to a turn, without text completions, what got no answer, and calls without results. */
function messages(exchange) {
  const chats = exchanges.slice(0, exchanges.indexOf(exchange) + 1).filter((e) => e.mode === "chat");
  return chats.flatMap((e, i) => {
    if (e === exchange) return e.turn;
    const results = chats[i + 1].turn[0].role === "tool";
    const calls = results ? { tool_calls: e.answer.calls.asSent } : {};
    const said = e.answer.text || results ? [{ role: "assistant", content: e.answer.text, ...calls }] : [];
    return said.length || e.turn[0].role === "tool" ? [...e.turn, ...said] : [];
  });
}

function send() {
  const prompt = $("prompt").value;
  if (running || !prompt.trim() || !optionsAreValid()) return;
  $("prompt").value = "";
  begin(options.mode.value, [{ role: "user", content: prompt }], "Prompt");
}

function sendResults(results) {
  if (!running && optionsAreValid()) begin("chat", results, "Result");
}

function begin(mode, turn, label) {
  exchanges.at(-1)?.answer.calls.settle();
  const exchange = { mode, turn, label, asked: null, answer: null, twins: [] };
  show(exchange);
  exchanges.push(exchange);
  ask(exchange);
}

/** Put on the page what was said, and a place for the answers to it. */
function show(exchange) {
  exchange.place = element("div", "answers");
  exchange.shown = exchange.turn.map(({ content }) => promptElement(content, exchange.mode, exchange.label));
  $("log").append(...exchange.shown, exchange.place);
}

function regenerate() {
  if (!running && exchanges.length && optionsAreValid()) ask(exchanges.at(-1));
}

async function ask(exchange) {
  exchange.asked = asked(exchange.mode, exchange.turn);
  exchange.place.replaceChildren();
  exchange.twins = [];
  exchange.answer = new Answer(exchange.place, exchange.mode);
  await run(exchange.answer, exchange, requestBody(exchange));
  const follow = atEnd();
  settle(exchange);
  keepEndInView(follow);
  save();
}

/** The same again without drafts. Where that may be another text by chance, both are asked for greedily. */
async function again(exchange) {
  if (running) return;
  exchange.place.replaceChildren(exchange.answer.element);
  exchange.twins = [];
  const { fields } = exchange.asked;
  const plain = { speculative: { metrics: fields.speculative.metrics, enabled: false } };
  const greedy = { temperature: 0 };
  const asks = hasOneText(fields)
    ? [["Answer without MTP", plain]]
    : [["Greedy answer", greedy], ["Greedy answer without MTP", { ...greedy, ...plain }]];
  for (const [label, changed] of asks) {
    const twin = new Answer(exchange.place, exchange.mode, label);
    exchange.twins.push(twin);
    await run(twin, exchange, requestBody(exchange, changed));
    if (twin.record.why) break;
  }
  const follow = atEnd();
  compare(exchange);
  keepEndInView(follow);
  save();
}

/** Whether a request has the same text with drafts and without: greedily, or by its seed if the server couples them. */
function hasOneText({ temperature = server.sampling_defaults?.temperature }) {
  return temperature === 0 || server.verifier === "coupled";
}

function compare({ place, answer, twins }) {
  const [drafted, plain] = [answer, ...twins].slice(-2);
  const said = plain && drafted.over(plain);
  if (said) place.append(element("p", "compared quiet", said));
}

/** Offer what can be done with an answer that has ended. */
function settle(exchange) {
  if (exchange.answer.waits && exchange === exchanges.at(-1)) exchange.answer.calls.ask(sendResults);
  if (exchange.asked.fields.speculative.enabled === false) return;
  const button = element("button", "small again", "Again without MTP");
  button.type = "button";
  button.title = "The same request; where sampling would give another text, greedily with drafts and without";
  button.addEventListener("click", () => again(exchange));
  exchange.answer.offer(button);
}

async function run(answer, { mode }, body) {
  const path = mode === "text" ? "v1/completions" : "v1/chat/completions";
  const controller = new AbortController();
  setRunning(controller);
  keepEndInView(true);
  try {
    for await (const chunk of stream(path, body, options.key.value, controller.signal, (names) => answer.warn(names))) {
      const follow = atEnd();
      answer.push(chunk);
      keepEndInView(follow);
    }
    const follow = atEnd();
    answer.close();
    keepEndInView(follow);
  } catch (error) {
    const follow = atEnd();
    answer.close(controller.signal.aborted ? controller.signal.reason : "failed");
    if (!controller.signal.aborted) answer.fail(error.message);
    keepEndInView(follow);
    if (error.status === 401) askForKey();
  }
  setRunning(null);
}

function clear() {
  running?.abort("stopped");
  for (const { shown, place } of exchanges) {
    for (const part of shown) part.remove();
    place.remove();
  }
  exchanges = [];
  setRunning(running);
  save();
  $("prompt").focus();
}

/** Keep the conversation and what belongs to it. */
function save() {
  const told = exchanges.map(({ mode, turn, label, asked, answer, twins }) => {
    return { mode, turn, label, asked, answer: answer.record, twins: twins.map((twin) => twin.record) };
  });
  if (told.length || JSON.stringify(settings()) !== INITIAL) keep({ settings: settings(), exchanges: told });
  else forget();
}

/** The settings by name, without the key, and without what the server leaves no choice in. */
function settings() {
  const forced = [options.key, ...(options.speculate.disabled ? [options.speculate] : [])];
  if (options.mode[0].disabled) forced.push(...options.mode);
  const own = [...options].filter((field) => field.name && !forced.includes(field));
  const chosen = own.filter((field) => field.type !== "radio" || field.checked);
  return Object.fromEntries(chosen.map((field) => [field.name, field[valueOf(field)]]));
}

function valueOf({ type }) {
  return type === "checkbox" ? "checked" : "value";
}

/** Show the conversation that was kept. */
function restore() {
  const { settings: own = {}, exchanges: told = [] } = kept() ?? {};
  for (const [name, value] of Object.entries(own)) {
    const field = options[name];
    if (!field) continue; // of another version of the page
    field[valueOf(field)] = value;
    if (name === "tools") checkTools(); // there are no names to choose from before
  }
  for (const { answer, twins = [], ...exchange } of told) {
    show(exchange);
    exchanges.push(exchange);
    const again = (record) => Answer.from(record, exchange.place, exchange.mode);
    exchange.answer = again(answer);
    exchange.twins = twins.map(again);
    compare(exchange);
  }
  exchanges.forEach(settle);
  setRunning(null);
  keepEndInView(true);
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("regenerate").disabled = running !== null || !exchanges.length;
  $("clear").disabled = !exchanges.length;
  document.body.classList.toggle("running", running !== null);
  $("welcome").hidden = exchanges.length > 0;
  // The button in use may have gone. On a phone, focus would bring up the keyboard over the answer.
  if (document.activeElement === document.body && !touch.matches) $("prompt").focus();
}

/** A field of nonsense reads as empty, which must not pass for the server's choice. */
function optionsAreValid() {
  if ($("options").checkValidity()) return true;
  showSettings(true);
  return $("options").reportValidity();
}

/** Whether the tools can be read; their names are offered as choices. */
function checkTools() {
  let names = [];
  try {
    names = (tools() ?? []).map((tool) => tool?.function?.name).filter((name) => typeof name === "string");
    options.tools.setCustomValidity("");
  } catch (error) {
    options.tools.setCustomValidity(`Tools are a JSON list, as in OpenAI's API: ${error.message}`);
  }
  const field = options.tool_choice;
  const chosen = field.value;
  for (const old of [...field.options].filter(({ value }) => nameOf(value))) old.remove();
  field.append(...names.map((name) => new Option(name, TOOL + name)));
  field.value = chosen;
  if (!field.value) field.value = "auto"; // the tool that was chosen has gone
}

/** The name of a tool that a choice forces; empty for the other choices. */
function nameOf(choice) {
  return choice.startsWith(TOOL) ? choice.slice(TOOL.length) : "";
}

function askForKey() {
  showSettings(true);
  options.key.focus();
}

function showSettings(shown) {
  $("settings").hidden = !shown;
  $("toggle-settings").setAttribute("aria-expanded", String(shown));
}

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function keepEndInView(wanted) {
  if (wanted) $("log").scrollTop = $("log").scrollHeight;
}

function showMode() {
  const text = options.mode.value === "text";
  for (const name of ["thinking", "system", "tools", "tool_choice"]) options[name].disabled = text;
  $("prompt").placeholder = text ? "Write the beginning of a text" : "Write a message";
  $("send").textContent = text ? "Complete" : "Send";
}

function showSpeculation() {
  options.depth.disabled = !options.speculate.checked;
  document.body.classList.toggle("plain", !options.colours.checked);
}

/** Name the model, and say how many programs the server has yet to make ready: it is slower until then. */
function showState(info) {
  const warming = info.state.startsWith("compiling");
  $("model").textContent = info.served_model_name + (warming ? `, ${info.state}` : "");
  if (warming) setTimeout(() => serverInfo(options.key.value).then(showState, () => {}), 2000);
}

/** Say what the model says of itself, with messages to try it with. */
function introduce({ about = "", prompts = [] }) {
  $("about").textContent = about;
  const buttons = prompts.map((text) => {
    const button = element("button", "small", text);
    button.type = "button";
    button.addEventListener("click", () => {
      if (running) return;
      options.mode.value = "chat";
      showMode();
      $("prompt").value = text;
      send();
    });
    return button;
  });
  $("examples").replaceChildren(...buttons);
}

/** Ask the server what it can do, and offer no more than that. */
async function connect() {
  try {
    const info = await serverInfo(options.key.value);
    server = info;
    showState(info);
    introduce((info.has_chat_template && info.introduction) || {});
    document.title = `${info.served_model_name} · mtp-jax`;
    $("notice").hidden = true;
    if (!info.has_chat_template) {
      options.mode.value = "text";
      options.mode[0].disabled = true;
      options.mode[0].parentElement.title = "This model has no chat template";
    }
    const deepest = info.num_speculative_tokens;
    options.speculate.disabled = !deepest;
    options.speculate.checked &&= deepest > 0;
    options.depth.max = deepest;
    options.depth.placeholder = info.adaptive_depth ? `0 to ${deepest}` : deepest;
    showMode();
    showSpeculation();
  } catch (error) {
    $("notice").textContent = error.message;
    $("notice").hidden = false;
    if (error.status === 401) askForKey();
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  // Safari ends a composition before it tells of the Enter that did, by 229 alone.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort("stopped");
});
$("stop").addEventListener("click", () => running?.abort("stopped"));
$("regenerate").addEventListener("click", regenerate);
$("clear").addEventListener("click", clear);
$("toggle-settings").addEventListener("click", () => showSettings($("settings").hidden));
$("options").addEventListener("submit", (event) => event.preventDefault());
$("options").addEventListener("change", (event) => {
  if (event.target === options.key) connect();
  showMode();
  showSpeculation();
  save();
});
options.tools.addEventListener("input", checkTools);
// The first of them comes before the browser ends the stream, where it comes at all.
for (const leaving of ["beforeunload", "pagehide"]) {
  addEventListener(leaving, () => {
    running?.abort("interrupted");
    save();
  });
}

restore();
showSettings(!narrow.matches);
connect();
