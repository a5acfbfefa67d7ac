"use strict";
// The page of both interfaces: chat and a view of the models for users; sleep and wake for operators. Whatever comes from the server is
// set as text, never as markup.

const isOperators = document.documentElement.dataset.interface === "operators";
const POLL_MS = 2000;
const WINDOW_MS = 60000;
const OPERATION_MS = 300;
const $ = (id) => document.getElementById(id);

// The key, for this tab only.

const KEY = isOperators ? "hardpoint-control-token" : "hardpoint-api-key";
let asking = null;

function askForKey(isWrong) {
  asking ??= new Promise((resolve) => {
    const what = isOperators ? "control token" : "API key";
    $("key-title").textContent = isOperators ? "Control token" : "API key";
    $("key-text").textContent = (isWrong ? `The server does not accept this ${what}. ` : `This server asks for its ${what}. `)
      + "It is kept for this tab only.";
    $("key").value = "";
    $("key-dialog").addEventListener("close", () => {
      if ($("key").value) sessionStorage.setItem(KEY, $("key").value);
      $("key").value = "";
      asking = null;
      resolve();
    }, { once: true });
    $("key-dialog").showModal();
  });
  return asking;
}

class ServerError extends Error {
  constructor(error, status) {
    super(error?.message ?? `The server answered ${status}.`);
    this.code = error?.code;
  }
}

async function call(path, { body, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const answer = await fetch(path, { ...options, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    if (answer.ok) return answer;
    if (answer.status !== 401) throw new ServerError((await answer.json().catch(() => ({}))).error, answer.status);
    // Another request may have been told the right one meanwhile.
    if (key === sessionStorage.getItem(KEY)) await askForKey(key !== null);
  }
}

const json = async (path, options) => (await call(path, options)).json();

// Numbers

const bytes = (count) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 999.5 && unit < units.length - 1; unit += 1) count /= 1000;
  return `${count >= 99.5 || unit === 0 ? Math.round(count) : count.toPrecision(2)} ${units[unit]}`;
};
const seconds = (value) => (value < 1 ? `${(value * 1000).toPrecision(value < 0.1 ? 2 : 3)} ms` : `${value.toFixed(2)} s`);
const rate = (value) => (value === 0 || value >= 100 ? Math.round(value).toString() : value.toFixed(1));

// Metrics, as Prometheus reads them

function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^hardpoint:(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped));
    }
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

const total = (metrics, name) => (metrics.get(name) ?? []).reduce((sum, one) => sum + one.value, 0);

function median(metrics, before, name) {
  const counts = new Map();
  for (const [from, sign] of [[metrics, 1], [before, -1]]) {
    for (const { labels, value } of from.get(`${name}_bucket`) ?? []) {
      const limit = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(limit, (counts.get(limit) ?? 0) + sign * value);
    }
  }
  const buckets = [...counts].sort(([a], [b]) => a - b);
  const all = buckets.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  let low = 0, below = 0;
  for (const [limit, count] of buckets) {
    if (count >= all / 2) return limit === Infinity ? low : low + ((limit - low) * (all / 2 - below)) / (count - below);
    [low, below] = [limit, count];
  }
  return low;
}

const samples = [];

function showActivity(metrics) {
  const now = performance.now();
  samples.push({ at: now, metrics, tokens: total(metrics, "generation_tokens_total") });
  while (samples.length > 1 && now - samples[0].at > WINDOW_MS) samples.shift();
  const rates = samples.slice(1).map((one, index) =>
    Math.max(one.tokens - samples[index].tokens, 0) / ((one.at - samples[index].at) / 1000));
  $("throughput").textContent = rates.length ? rate(rates.at(-1)) : "–";
  const waiting = total(metrics, "num_requests_waiting");
  $("running").textContent = `${total(metrics, "num_requests_running")}${waiting ? ` + ${waiting} waiting` : ""}`;
  for (const [id, name] of [["first-token", "time_to_first_token_seconds"], ["inter-token", "inter_token_latency_seconds"]]) {
    const found = median(metrics, samples[0].metrics, name);
    $(id).textContent = found === null ? "–" : seconds(found);
  }
  const top = Math.max(...rates, 1);
  const step = 100 / (WINDOW_MS / POLL_MS);
  $("spark").firstElementChild.setAttribute("points", rates.map((value, index) =>
    `${(100 - (rates.length - 1 - index) * step).toFixed(1)},${(23 - (21 * value) / top).toFixed(1)}`).join(" "));
}

// Models

const cards = new Map();
const STATES = { weights_missing: "weights missing" };
const PLACES = { device: "on device", host: "on host", disk: "on disk", source: "to read again" };

function memoryOf(metrics, model) {
  const tags = new Map();
  for (const { labels, value } of metrics.get("memory_bytes") ?? []) {
    if (labels.model_name !== model) continue;
    if (!tags.has(labels.tag)) tags.set(labels.tag, {});
    tags.get(labels.tag)[labels.place] = value;
  }
  return tags;
}

function showModels(models, metrics) {
  for (const name of cards.keys()) {
    if (models.some((model) => model.name === name)) continue;
    cards.get(name).root.remove();
    cards.delete(name);
  }
  for (const model of models) {
    if (!cards.has(model.name)) cards.set(model.name, newCard(model.name));
    const card = cards.get(model.name);
    card.state.textContent = STATES[model.state] ?? model.state;
    card.state.className = `state ${model.state}`;
    const reason = model.failure ?? (model.state === "sleeping" ? model.reason : "");
    card.reason.textContent = reason ?? "";
    card.reason.hidden = !reason;
    showTags(card, memoryOf(metrics, model.name));
    showActions(card, model);
  }
}

function newCard(name) {
  const root = $("card").content.firstElementChild.cloneNode(true);
  const card = {
    name, root, operation: null, holdsFocus: false,
    state: root.querySelector(".state"), reason: root.querySelector(".reason"), tags: root.querySelector(".tags"),
    progress: root.querySelector("progress"), error: root.querySelector(".error"), actions: root.querySelector(".actions"),
  };
  root.querySelector("h3").textContent = name;
  card.progress.setAttribute("aria-label", `Progress of ${name}`);
  for (const button of card.actions.children) {
    button.setAttribute("aria-label", `${button.textContent}: ${name}`);
    button.addEventListener("click", () => act(card, button.dataset.action));
  }
  $("models").append(root);
  return card;
}

function showTags(card, tags) {
  const sizeOf = (places) => Math.max(...Object.values(places));
  const shown = [...tags].filter(([, places]) => sizeOf(places) > 0).sort((one, other) => sizeOf(other[1]) - sizeOf(one[1]));
  card.tags.replaceChildren(...shown.map(([tag, { allocated = 0, ...places }]) => {
    const there = Object.keys(PLACES).filter((place) => places[place] > 0);
    const row = document.createElement("div");
    const name = document.createElement("span");
    name.textContent = tag.replaceAll("_", " ");
    const where = document.createElement("span");
    where.className = "where";
    where.textContent = there.map((place) => `${bytes(places[place])} ${PLACES[place]}`).join(" · ") || `${bytes(allocated)} given back`;
    const track = document.createElement("div");
    track.className = "track";
    // What is on the device is drawn alone; a copy beside it is only told.
    for (const place of places.device > 0 ? ["device"] : there) {
      const bar = document.createElement("i");
      bar.className = place;
      bar.style.width = `${(100 * places[place]) / sizeOf(shown[0][1])}%`;
      track.append(bar);
    }
    row.append(name, where, track);
    return row;
  }));
}

function showActions(card, model) {
  if (!isOperators) return;
  card.actions.hidden = false;
  const { state, sleep } = model;
  const isBusy = card.operation !== null;
  const isPaused = state === "sleeping" && sleep?.asleep.length === 0;
  const offered = {
    sleep: state === "running" && !isBusy,
    discard: state === "running" && !isBusy,
    wake: state === "sleeping" && !isPaused && !isBusy,
    resume: isPaused && !isBusy,
    reload: state === "weights_missing" && !isBusy,
    cancel: isBusy && card.operation.canCancel,
  };
  // The button that was pressed goes, and what comes after it has the focus.
  card.holdsFocus = card.actions.contains(document.activeElement) || (card.holdsFocus && document.activeElement === document.body);
  for (const button of card.actions.children) button.hidden = !offered[button.dataset.action];
  if (card.holdsFocus && (document.activeElement === document.body || document.activeElement.hidden)) {
    [...card.actions.children].find((button) => !button.hidden)?.focus();
  }
}

async function act(card, action) {
  const place = `models/${encodeURIComponent(card.name)}`;
  card.error.hidden = true;
  try {
    if (action === "cancel") {
      await call(`operations/${card.operation.id}`, { method: "DELETE" });
    } else if (action === "sleep" || action === "discard") {
      // Requests in progress end first, so that nobody's answer is cut off by a click.
      const body = { level: action === "sleep" ? 1 : 2, mode: "wait" };
      await follow(card, await json(`${place}/sleep?wait=false`, { method: "POST", body }), true);
    } else if (action === "resume") {
      await call(`${place}/resume`, { method: "POST" });
    } else {
      await follow(card, await json(`${place}/${action}?wait=false`, { method: "POST" }), false);
    }
  } catch (error) {
    card.error.textContent = error.message;
    card.error.hidden = false;
  }
  await poll();
}

async function follow(card, operation, canCancel) {
  card.operation = { id: operation.id, canCancel };
  card.progress.hidden = false;
  try {
    await poll();
    while (operation.state === "running") {
      await new Promise((resolve) => setTimeout(resolve, OPERATION_MS));
      operation = await json(`operations/${operation.id}`);
      const { bytes: done, total: all } = operation.progress;
      if (all) card.progress.value = done / all;
      else card.progress.removeAttribute("value");
    }
    if (operation.error) throw new ServerError(operation.error);
  } finally {
    card.operation = null;
    card.progress.hidden = true;
  }
}

let isPolling = false;
let hasMetrics = true;

// Replicas' metrics are not gathered. Then the models are asked for once, since to ask on and on would keep a replica from ending.
async function readMetrics() {
  try {
    return parseMetrics(await (await call("metrics")).text());
  } catch (error) {
    if (error.code !== "unknown_path") throw error;
    hasMetrics = false;
    $("activity-section").hidden = true;
    document.querySelector(".legend").hidden = true;
    return new Map();
  }
}

async function poll() {
  if (isPolling || (!hasMetrics && cards.size)) return;
  isPolling = true;
  try {
    const metrics = hasMetrics ? await readMetrics() : new Map();
    let models;
    if (isOperators) {
      const all = await json("models");
      models = all.models;
      $("budget").hidden = !all.device_memory;
      const taken = models.reduce((sum, model) => sum + model.device_bytes, 0);
      if (all.device_memory) $("budget").textContent = `${bytes(taken)} of ${bytes(all.device_memory)} of the device`;
    } else {
      models = (await json("v1/models")).data.map((model) => ({ ...model, name: model.id }));
      showChoices(models);
    }
    showModels(models, metrics);
    if (hasMetrics) showActivity(metrics);
    $("connection").textContent = "Connected";
    $("connection").className = "";
  } catch (error) {
    $("connection").textContent = error instanceof ServerError ? error.message : "The server does not answer";
    $("connection").className = "lost";
  } finally {
    isPolling = false;
  }
}

async function pollAlways() {
  if (!document.hidden) await poll();
  setTimeout(pollAlways, POLL_MS);
}

// Chat

let messages = [];
let answering = null;

function showChoices(models) {
  const select = $("model");
  const names = models.map((model) => model.name);
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

// Text and fenced code, in order; a fence that is still open runs to the end.
function segments(text) {
  const found = [];
  let lines = [], isCode = false;
  const close = () => {
    const joined = lines.join("\n");
    if (isCode || joined.trim()) found.push({ isCode, text: isCode ? joined : joined.replace(/^\n+|\n+$/g, "") });
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (/^\s*```/.test(line)) {
      close();
      isCode = !isCode;
    } else {
      lines.push(line);
    }
  }
  close();
  return found;
}

function showText(place, text) {
  const parts = segments(text);
  if (!parts.length) parts.push({ isCode: false, text: "" });
  place.replaceChildren(...parts.map((part) => {
    const made = document.createElement(part.isCode ? "pre" : "div");
    if (part.isCode) {
      const code = document.createElement("code");
      code.textContent = part.text;
      made.append(code);
      made.tabIndex = 0;
    } else {
      made.className = "text";
      made.textContent = part.text;
    }
    return made;
  }));
}

function newMessage(role, text) {
  $("empty").hidden = true;
  const root = document.createElement("article");
  root.className = `message ${role}`;
  root.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const body = document.createElement("div");
  root.append(body);
  showText(body, text);
  $("log").append(root);
  $("log").scrollTop = $("log").scrollHeight;
  return { root, body };
}

// What a model writes before its answer, open until that begins.
function showReasoning(root, text, isOver) {
  let details = root.querySelector("details");
  if (!details) {
    details = document.createElement("details");
    details.open = true;
    const summary = document.createElement("summary");
    summary.textContent = "Reasoning";
    details.append(summary, document.createElement("p"));
    root.prepend(details);
  }
  details.lastElementChild.textContent = text;
  if (isOver && !details.dataset.isOver) {
    details.open = false;
    details.dataset.isOver = true;
  }
}

async function* serverEvents(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ") && event !== "data: [DONE]") yield JSON.parse(event.slice(6));
    }
  }
}

function answerRequest() {
  const system = $("system").value.trim();
  const body = {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { continuous_usage_stats: true },
  };
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("max-tokens").value !== "") body.max_tokens = Number($("max-tokens").value);
  return body;
}

async function answer(headers = {}) {
  const { root, body } = newMessage("assistant", "");
  const conversation = messages;  // a new one may begin meanwhile
  const abort = new AbortController();
  answering = abort;
  showBusy(root, true);
  let text = "", reasoning = "", tokens = 0, reason = null, first = null, last = null, isDrawn = true, failure = null;
  const start = performance.now();
  const draw = () => {
    const log = $("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    isDrawn = true;
    if (reasoning) showReasoning(root, reasoning, Boolean(text));
    showText(body, text);
    if (follows) log.scrollTop = log.scrollHeight;
  };
  try {
    const options = { method: "POST", body: answerRequest(), headers, signal: abort.signal };
    for await (const event of serverEvents(await call("v1/chat/completions", options))) {
      if (event.error) throw new ServerError(event.error);
      const choice = event.choices[0];
      tokens = event.usage?.completion_tokens ?? tokens;
      reason = choice?.finish_reason ?? reason;
      if (tokens) {
        last = performance.now();
        first ??= last;
      }
      text += choice?.delta.content ?? "";
      reasoning += choice?.delta.reasoning_content ?? "";
      if (isDrawn) {
        isDrawn = false;
        requestAnimationFrame(draw);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else failure = error;
  }
  answering = null;
  draw();
  showBusy(root, false);
  if (text) conversation.push({ role: "assistant", content: text });
  if (tokens) showFacts(root, tokens, first - start, last - first, reason);
  if (failure) showFailure(root, failure, text);
  $("log").scrollTop = $("log").scrollHeight;
}

function showFacts(root, tokens, untilFirst, afterwards, reason) {
  const told = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  if (tokens > 1 && afterwards > 0) told.push(`${rate(((tokens - 1) * 1000) / afterwards)} tokens/s`);
  told.push(`first token after ${seconds(untilFirst / 1000)}`);
  if (reason === "length") told.push("the limit of tokens was reached");
  if (reason === "stopped" || reason === "abort") told.push("stopped");
  const facts = document.createElement("p");
  facts.className = "facts";
  facts.textContent = told.join(" · ");
  root.append(facts);
}

function showFailure(root, failure, text) {
  const error = document.createElement("p");
  error.className = "error";
  error.textContent = failure instanceof ServerError ? failure.message : "The server does not answer.";
  root.append(error);
  if (text) return;
  const again = document.createElement("button");
  again.type = "button";
  again.className = "again";
  const isAsleep = failure.code === "model_asleep";
  again.textContent = isAsleep ? "Wake the model and send again" : "Send again";
  again.addEventListener("click", () => {
    if (answering) return;
    root.remove();
    answer(isAsleep ? { "X-When-Asleep": "wake" } : {});
  });
  root.append(again);
}

function showBusy(root, isBusy) {
  root.classList.toggle("busy", isBusy);
  // Screen readers read an answer once it is whole.
  $("log").setAttribute("aria-busy", String(isBusy));
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  if (document.activeElement === document.body) $("prompt").focus();
}

function send() {
  const text = $("prompt").value;
  if (answering || !text.trim()) return;
  $("prompt").value = "";
  fitPrompt();
  for (const button of document.querySelectorAll(".again")) button.remove();
  // What was never answered is asked again together with what is asked now.
  if (messages.at(-1)?.role === "user") messages.at(-1).content += `\n\n${text}`;
  else messages.push({ role: "user", content: text });
  newMessage("user", text);
  answer();
}

function fitPrompt() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}

function show(view) {
  document.body.dataset.view = view;
  $("show-chat").setAttribute("aria-pressed", String(view === "chat"));
  $("show-models").setAttribute("aria-pressed", String(view === "models"));
}

$("show-chat").addEventListener("click", () => show("chat"));
$("show-models").addEventListener("click", () => show("models"));
$("settings-button").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("settings-button").setAttribute("aria-expanded", String(!$("settings").hidden));
});
$("new-chat").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  for (const message of document.querySelectorAll(".message")) message.remove();
  $("empty").hidden = false;
  $("prompt").focus();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("input", fitPrompt);
$("prompt").addEventListener("keydown", (event) => {
  // While an input method composes, Enter is its own.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => answering?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("key-dialog").open) answering?.abort();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});

if (isOperators) document.title = "Hardpoint control";
else $("prompt").focus();
pollAlways();
