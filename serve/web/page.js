// The page: what is asked with which options, and what its buttons do.

import { Answer, promptElement } from "./answer.js";
import { serverInfo, stream } from "./api.js";

const $ = (id) => document.getElementById(id);
const options = $("options").elements;
const narrow = matchMedia("(max-width: 55rem)");
const touch = matchMedia("(hover: none)");
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

let exchanges = []; // {mode, turn, answer, shown}, in the order of the page; a turn is what was said, as messages
let running = null; // an AbortController while an answer comes

function requestBody(exchange) {
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    return_token_origins: true,
    speculative: { metrics: "summary" },
  };
  for (const name of NUMBERS) {
    if (options[name].value !== "") body[name] = options[name].valueAsNumber;
  }
  if (!options.speculate.checked) body.speculative.enabled = false;
  else if (options.depth.value !== "") body.speculative.max_tokens = options.depth.valueAsNumber;
  if (exchange.mode === "text") return { ...body, prompt: exchange.turn[0].content };
  if (options.thinking.checked) body.chat_template_kwargs = { thinking: true };
  return { ...body, tools: tools(), messages: messages(exchange) };
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
  const shown = turn.map(({ content }) => promptElement(content, mode, label));
  $("log").append(...shown);
  const exchange = { mode, turn, answer: null, shown };
  exchanges.push(exchange);
  answer(exchange);
}

function regenerate() {
  if (running || !exchanges.length || !optionsAreValid()) return;
  exchanges.at(-1).answer.element.remove();
  answer(exchanges.at(-1));
}

async function answer(exchange) {
  const path = exchange.mode === "text" ? "v1/completions" : "v1/chat/completions";
  const controller = new AbortController();
  exchange.answer = new Answer($("log"), exchange.mode);
  setRunning(controller);
  keepEndInView(true);
  try {
    for await (const chunk of stream(path, requestBody(exchange), options.key.value, controller.signal)) {
      const follow = atEnd();
      exchange.answer.push(chunk);
      keepEndInView(follow);
    }
    const follow = atEnd();
    exchange.answer.close();
    if (exchange.answer.waits) exchange.answer.calls.ask(sendResults);
    keepEndInView(follow);
  } catch (error) {
    const follow = atEnd();
    exchange.answer.close(controller.signal.aborted ? "stopped" : "failed");
    if (!controller.signal.aborted) exchange.answer.fail(error.message);
    keepEndInView(follow);
    if (error.status === 401) askForKey();
  }
  setRunning(null);
}

function clear() {
  running?.abort();
  for (const { shown, answer } of exchanges) {
    for (const part of shown) part.remove();
    answer.element.remove();
  }
  exchanges = [];
  setRunning(running);
  $("prompt").focus();
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("regenerate").disabled = running !== null || !exchanges.length;
  $("clear").disabled = !exchanges.length;
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

function checkTools() {
  try {
    tools();
    options.tools.setCustomValidity("");
  } catch (error) {
    options.tools.setCustomValidity(`Tools are a JSON list, as in OpenAI's API: ${error.message}`);
  }
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
  options.thinking.disabled = options.tools.disabled = text;
  $("prompt").placeholder = text ? "Write the beginning of a text" : "Write a message";
  $("send").textContent = text ? "Complete" : "Send";
}

function showSpeculation() {
  options.depth.disabled = !options.speculate.checked;
  document.body.classList.toggle("plain", !options.colours.checked);
}

/** Name the model, and say how far the server has come with compiling: it is slower until then. */
function showState(info) {
  const compiles = info.state.startsWith("compiling");
  $("model").textContent = info.served_model_name + (compiles ? `, ${info.state} programs` : "");
  if (compiles) setTimeout(() => serverInfo(options.key.value).then(showState, () => {}), 2000);
}

/** Ask the server what it can do, and offer no more than that. */
async function connect() {
  try {
    const info = await serverInfo(options.key.value);
    showState(info);
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
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("regenerate").addEventListener("click", regenerate);
$("clear").addEventListener("click", clear);
$("toggle-settings").addEventListener("click", () => showSettings($("settings").hidden));
$("options").addEventListener("submit", (event) => event.preventDefault());
$("options").addEventListener("change", (event) => {
  if (event.target === options.key) connect();
  checkTools();
  showMode();
  showSpeculation();
});

showSettings(!narrow.matches);
connect();
