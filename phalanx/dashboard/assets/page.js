// The page: draws what the server (or, in a report, the page itself) says of one job.

const find = (id) => document.getElementById(id);
const embedded = JSON.parse(find("data").textContent || "null");
const job = { head: null, points: [], epochs: [], spans: [], generations: [], checkpoints: [], feed: [], outputs: {} };
const charts = new Map();
let axis = "time", source = null, shown = null, outputTask = null;

// What arrives: the head always, the other parts when they have changed; `points` alone may be an addition.
function receive(message) {
  job.head = message.head;
  if (message.points) job.points = message.more ? job.points.concat(message.points) : message.points;
  for (const part of ["epochs", "spans", "generations", "checkpoints", "feed", "outputs"]) {
    if (message[part]) job[part] = message[part];
  }
  draw();
}

function draw() {
  const head = job.head;
  document.title = `${head.status === "running" ? "" : `${head.status}: `}${head.program || "Phalanx"}`;
  find("program").textContent = head.program;
  find("program").title = head.program;
  pill(head.problem || head.status, head.problem ? "lost" : head.status);
  drawEnding(head);
  drawTiles(head);
  drawCharts(head);
  drawMembers(head);
  drawTimeline(find("timeline"), job);
  drawTime(head);
  drawHosts(head);
  drawFeed(head);
  drawActions(head);
  drawOutputTasks(head);
  find("footer").textContent = `Job ${head.job}, ${head.kind}, Phalanx ${head.version}${head.log_dir ? `, logs in ${head.log_dir}` : ""}`;
}

function pill(text, kind) {
  find("status").textContent = text;
  find("status").className = `pill ${kind}`;
}

// A job that was stopped has one line; one that failed, its report: folded first, as on a terminal.
function drawEnding(head) {
  find("ending").hidden = head.status !== "stopped";
  find("ending").textContent = `${head.ending.charAt(0).toUpperCase()}${head.ending.slice(1)}.`;
  const [page, folded] = [withoutRules(head.page), withoutRules(head.folded)];
  const [first, all] = find("failure").querySelectorAll("pre");
  find("failure").hidden = !page;
  find("failure").querySelector("details").hidden = !folded || folded === page;
  first.textContent = folded || page;
  all.textContent = page;
}

// Its first and last line divide it from other output on a terminal; here the card does.
function withoutRules(page) {
  return page.replace(/^-{20,}$\n?/gm, "");
}

function drawTiles(head) {
  const main = "loss" in head.logs ? "loss" : Object.keys(head.logs)[0];
  const lastEpoch = job.epochs[job.epochs.length - 1];
  const tiles = [
    ["Time", show.duration((head.ended || head.now) - head.began), head.ended ? "ended" : "since the start"],
    ["Steps", head.steps.toLocaleString("en"), head.place],
    [!main || main === "loss" ? "Loss" : main, main ? show.number(head.logs[main]) : "–", lastEpoch && `val_${main}` in lastEpoch[3] ? `validation ${show.number(lastEpoch[3][`val_${main}`])}` : ""],
    ...(head.ended ? pastTiles(head) : presentTiles(head)),
  ].filter(([, value]) => !head.ended || value !== "–");
  fill(find("tiles"), 
    ...tiles.map(([name, value, note]) =>
      element("div", { class: "tile", "data-name": name }, element("div", { class: "name" }, name), element("div", { class: "value", title: value }, value), element("div", { class: "note", title: note }, note)),
    ),
  );
}

function presentTiles(head) {
  const range = head.minimum === head.maximum ? `of ${head.maximum}` : `of ${head.minimum} to ${head.maximum}`;
  const memory = head.members.reduce((sum, member) => sum + (member.is_running ? member.memory : 0), 0);
  return [
    ["Samples/s", head.samples_per_s ? show.number(head.samples_per_s) : "–", `${show.number(head.steps_per_s)} steps/s`],
    ["Workers", String(head.workers), `${range}${head.generation ? `, generation ${head.generation}` : ""}`],
    ["Sent", `${show.bytes(head.bytes_per_s)}/s`, `${show.bytes(head.network_bytes_per_s)}/s over the network`],
    ["Memory", memory ? show.bytes(memory) : "–", "of all members"],
  ];
}

// Of a job that is over: sums and means.
function pastTiles(head) {
  const trained = Math.max(0, ...head.members.map((member) => member.computed_s + member.waited_s));
  const processes = head.members.reduce((sum, member) => sum + member.starts, 0);
  return [
    ["Samples/s", trained ? show.number(head.samples / trained) : "–", `${head.samples.toLocaleString("en")} samples`],
    ["Members", String(head.members.length), `${counted(processes, "process", "processes")}${head.generation ? `, ${counted(head.generation, "generation")}` : ""}`],
    ["Sent", show.bytes(head.bytes_sent), "in total"],
  ];
}

function drawCharts(head) {
  const byTime = axis === "time", began = head.began;
  const at = (point) => (byTime ? point[0] - began : point[1]);
  const settings = { time: byTime };
  const names = [...new Set([...job.points.flatMap((point) => Object.keys(point[5])), ...job.epochs.flatMap((each) => Object.keys(each[3]).map((name) => name.replace(/^val_/, "")))])];
  names.sort((a, b) => (b === "loss") - (a === "loss") || a.localeCompare(b));
  const wantedCharts = names.slice(0, 12).map((name) => [
    `log:${name}`,
    name,
    show.number,
    [
      { name: "train", points: job.points.filter((point) => name in point[5]).map((point) => [at(point), point[5][name]]) },
      { name: "val", dots: true, points: job.epochs.filter((each) => `val_${name}` in each[3]).map((each) => [at(each), each[3][`val_${name}`]]) },
    ],
  ]);
  if (!names.length) wantedCharts.push(["log:loss", "loss", show.number, []]);
  // A job that is over has a speed as long as it took steps.
  const lastStep = job.points.findIndex((point) => head.ended && point[1] === head.steps);
  const moving = lastStep < 0 ? job.points : job.points.slice(0, lastStep + 1);
  wantedCharts.push(["speed", "Samples/s", show.number, [{ name: "samples/s", points: moving.map((point) => [at(point), point[2]]) }]]);
  wantedCharts.push(["bytes", "Bytes sent/s", show.bytes, [{ name: "bytes/s", points: moving.map((point) => [at(point), point[4]]) }], 1]);
  drawEach(head.ended ? wantedCharts.filter(([, , , series]) => series.some((each) => each.points.some((point) => point[1]))) : wantedCharts, settings);
}

function drawEach(wantedCharts, settings) {
  find("charts").parentElement.hidden = !wantedCharts.length;
  for (const [id, title, format, series, least] of wantedCharts) {
    if (!charts.has(id)) charts.set(id, new LineChart(title, format, least));
    charts.get(id).update(series, settings);
  }
  const order = wantedCharts.map(([id]) => id);
  for (const id of [...charts.keys()].filter((id) => !order.includes(id))) {
    charts.get(id).root.remove();
    charts.delete(id);
  }
  const roots = order.map((id) => charts.get(id).root);
  if (roots.some((root, index) => find("charts").children[index] !== root)) find("charts").replaceChildren(...roots);
}

// Of a job that is over, only what is known of the whole of it.
function drawMembers(head) {
  const names = head.ended ? ["task", "host", "time", "end"] : ["task", "host", "last seconds", "memory", "speed", "does"];
  const cells = head.ended ? (member) => [timeBar(member), doesCell(member)] : (member) => [stepBar(member), memoryCell(member), speedCell(member), doesCell(member)];
  const rows = head.members.map((member) =>
    element("div", { class: `member ${member.is_running || head.ended ? "" : "gone"}`, "data-task": member.task, "data-state": member.state }, taskCell(member), hostCell(member), ...cells(member)),
  );
  find("members").className = `members ${head.ended ? "over" : ""}`;
  fill(find("members").parentElement.querySelector("h2"), "Members", element("div", { class: "keys" }, key("--blue", "computes"), key("--wait", "waits for others")));
  fill(find("members"), element("div", { class: "member head" }, ...names.map((name) => element("div", {}, name))), ...rows);
}

function key(color, text) {
  return element("span", {}, element("i", { style: { background: `var(${color})` } }), text);
}

function taskCell(member) {
  return element("div", {}, element("span", { class: `dot ${member.state}` }), element("button", { class: "task", title: "Show its output", onclick: () => showOutput(member.task) }, member.task));
}

function hostCell(member) {
  return element("div", { title: `${member.host}, pid ${member.pid}` }, member.host, " ", element("span", { class: "dim" }, member.pid ? String(member.pid) : ""));
}

// What a member that runs does with its time now; nothing before its first step is over, and for servers.
function stepBar(member) {
  if (member.version != null) return barCell(null, `version ${member.version.toLocaleString("en")}`);
  if (member.is_preparing || !member.is_running || !member.reported) return timeBar(member);
  return barCell(member.wait_fraction, member.compute_s == null ? "" : `computes ${show.ms(member.compute_s)}, waits ${show.ms(member.wait_s)} per step`);
}

// What it has done with its time since it has trained.
function timeBar(member) {
  if (member.version != null) return barCell(null, `version ${member.version.toLocaleString("en")}`);
  const spent = member.is_preparing ? 0 : member.computed_s + member.waited_s;
  return spent ? barCell(member.waited_s / spent, `computes ${show.span(member.computed_s)}, waits ${show.span(member.waited_s)}`) : barCell(null, "");
}

function barCell(waiting, note) {
  const parts = waiting == null ? [] : [["computes", 1 - waiting], ["waits", waiting]];
  const bar = element("div", { class: "split" }, ...parts.map(([name, part]) => element("i", { class: name, style: { width: `${Math.round(100 * part)}%` } })));
  return element("div", { class: "bars" }, bar, element("div", { class: "dim" }, note));
}

function memoryCell(member) {
  const gpu = member.gpu ? `GPU ${Math.round(100 * member.gpu.utilization)}%, ${show.bytes(member.gpu.memory)}` : "";
  return element("div", {}, member.is_running && member.memory ? show.bytes(member.memory) : "", element("div", { class: "dim", title: member.gpu ? member.gpu.name : "" }, gpu));
}

function speedCell(member) {
  const speed = member.version != null ? `${show.number(member.updates_per_s)} updates/s` : member.steps_per_s ? `${show.number(member.samples_per_s)} samples/s` : "";
  return element("div", { class: "rates" }, member.is_running ? speed : "");
}

function doesCell(member) {
  const again = member.starts > 1 ? `started ${member.starts} times` : "";
  return element("div", { class: "does", title: member.does }, member.does, again ? element("div", { class: "dim" }, again) : null);
}

function drawTime(head) {
  const parts = [["computes", "computed_s", "computing"], ["waits", "waited_s", "waiting"], ["starts", "rest_s", "starting"]];
  const rows = head.members.filter((member) => member.computed_s + member.waited_s > 0);
  const longest = Math.max(1e-9, ...rows.map((member) => member.lived_s));
  const keys = element("div", { class: "keys" }, key("--blue", "computing"), key("--wait", "waiting"), key("--violet", "starting"));
  find("time-card").hidden = head.ended > 0 && !rows.length;
  fill(find("time-card").querySelector("h2"), "Where the time went", keys);
  if (!rows.length) return fill(find("time"), element("div", { class: "empty" }, "No figures yet."));
  fill(find("time"), 
    ...rows.map((member) =>
      element(
        "div",
        { class: "row" },
        element("div", {}, member.task),
        element("div", {},
          element("div", { class: "split" }, ...parts.map(([name, field]) => element("i", { class: name, style: { width: `${(100 * member[field]) / longest}%` } }))),
          element("div", { class: "dim" }, parts.map(([, field, name]) => `${name} ${show.span(member[field])}`).join(", ")),
        ),
      ),
    ),
  );
}

function drawHosts(head) {
  if (!head.hosts.length) return fill(find("hosts"), element("div", { class: "empty" }, "No hosts."));
  fill(find("hosts"), 
    ...head.hosts.map((host) => {
      const slots = element("div", { class: "slots" }, ...Array.from({ length: Math.min(64, host.slots) }, (_, index) => element("i", { class: index < host.taken ? "taken" : "" })));
      const drain = actionButton(head, "drain", "Drain", { host: host.name }, `Drain ${host.name}? Its workers leave before the next step.`);
      const buttons = head.live && !host.is_drained ? drain : null;
      return element("div", { class: "host" }, element("div", { class: "grow" }, element("b", {}, host.name), " ", element("span", { class: "dim" }, hostNote(head, host))), head.ended ? null : slots, buttons);
    }),
  );
}

function hostNote(head, host) {
  if (host.is_drained) return "drained";
  if (host.blacklisted_s != null) return `blacklisted${head.ended ? "" : ` for ${show.duration(host.blacklisted_s)}`}: ${host.reason}`;
  return head.ended ? counted(host.tasks, "task") : `${host.taken} of ${host.slots} slots taken`;
}

function drawFeed() {
  const items = job.feed.slice(-200).reverse();
  fill(find("feed"), 
    ...items.map(([at, level, text]) =>
      element("li", { class: level }, element("time", {}, new Date(at * 1000).toLocaleTimeString([], { hour12: false })), element("i"), element("span", {}, text)),
    ),
  );
}

function drawActions(head) {
  if (!head.live) return fill(find("actions"));
  const reason = head.actions.scale;
  const step = (by) => element("button", { id: by > 0 ? "more" : "less", title: reason || workers(head.wanted + by), disabled: !!reason || head.wanted + by < head.minimum || head.wanted + by > head.maximum, onclick: () => act("scale", { workers: head.wanted + by }) }, by > 0 ? "+" : "−");
  fill(find("actions"), 
    actionButton(head, "checkpoint", "Checkpoint"),
    element("div", { class: "scale" }, step(-1), element("span", { title: reason }, workers(head.wanted)), step(1)),
    actionButton(head, "stop", "Stop", {}, "Stop the job? A fit with a Checkpoint saves its state first.", "danger"),
  );
}

function workers(number) {
  return counted(number, "worker");
}

function counted(number, one, more = `${one}s`) {
  return `${number} ${number === 1 ? one : more}`;
}

function actionButton(head, action, text, body = {}, question = "", kind = "") {
  const reason = head.actions[action];
  return element("button", { id: body.host ? null : action, class: kind, title: reason || text, disabled: !!reason, onclick: () => (!question || confirm(question)) && act(action, body) }, text);
}

async function act(action, body) {
  try {
    const answer = await fetch("act", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...body, action, job: shown }) });
    const found = await answer.json();
    toast(found.text || found.refusal || `error ${answer.status}`);
  } catch (error) {
    toast(`The dashboard does not answer: ${error.message}`);
  }
}

function toast(text) {
  find("toast").textContent = text;
  find("toast").classList.add("shown");
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => find("toast").classList.remove("shown"), 6000);
}

// The end of a task's output.
function drawOutputTasks(head) {
  const tasks = head.members.filter((member) => member.starts || job.outputs[member.task]).map((member) => member.task);
  const select = find("output-task");
  if ([...select.options].map((each) => each.value).join() !== tasks.join()) {
    select.replaceChildren(...tasks.map((task) => element("option", { value: task }, task)));
    if (!tasks.includes(outputTask)) outputTask = head.cause && tasks.includes(head.cause) ? head.cause : tasks[0];
    select.value = outputTask;
    loadOutput();
  }
}

function showOutput(task) {
  outputTask = task;
  find("output-task").value = task;
  loadOutput();
  find("output-card").scrollIntoView({ behavior: "smooth", block: "nearest" });
}

async function loadOutput() {
  const task = outputTask, asked = shown, pre = find("output");
  if (!task) return;
  let text = job.outputs[task];
  if (!embedded) {
    const answer = await fetch(`output?job=${encodeURIComponent(asked || "")}&task=${encodeURIComponent(task)}`).catch(() => null);
    const found = answer && answer.status === 200 ? await answer.text() : null;
    if (task !== outputTask || asked !== shown) return; // another output has been chosen meanwhile
    if (found != null) text = job.outputs[task] = found;
    else if (answer && answer.status === 204) text ??= "The job has ended. --log-dir keeps its output in files.";
    else return;
  }
  const atEnd = pre.scrollTop + pre.clientHeight > pre.scrollHeight - 20;
  pre.textContent = text || (embedded ? "No output." : "Nothing yet.");
  if (atEnd) pre.scrollTop = pre.scrollHeight;
}

// Where the messages come from.
function follow(id) {
  shown = id;
  Object.assign(job, { points: [], epochs: [], spans: [], generations: [], checkpoints: [], feed: [], outputs: {} });
  find("output-task").replaceChildren(); // the output on show is that of the job before
  find("output").textContent = "";
  if (source) source.close();
  source = new EventSource(`events?job=${encodeURIComponent(id || "")}`);
  source.addEventListener("message", (event) => receive(JSON.parse(event.data)));
  source.addEventListener("jobs", (event) => drawJobs(JSON.parse(event.data)));
  source.addEventListener("over", () => source.close());
  source.addEventListener("error", () => {
    if (!job.head || job.head.status === "running") pill("connection lost", "lost");
  });
}

function drawJobs(message) {
  const { jobs, job: chosen } = message;
  shown = chosen;
  const select = find("jobs");
  select.hidden = jobs.length < 2;
  select.replaceChildren(...jobs.map((each) => element("option", { value: each.job }, `${each.job}  ${each.program}`)));
  select.value = chosen || "";
  if (!chosen) pill("no job is running", "");
}

function begin() {
  for (const [name, text] of [["time", "time"], ["step", "steps"]]) {
    find("axis").append(
      element("button", { "aria-pressed": String(axis === name), onclick: (event) => {
        axis = name;
        find("axis").querySelectorAll("button").forEach((each) => each.setAttribute("aria-pressed", String(each === event.target)));
        if (job.head) drawCharts(job.head);
      } }, text),
    );
  }
  find("output-task").addEventListener("change", (event) => showOutput(event.target.value));
  find("jobs").addEventListener("change", (event) => follow(event.target.value));
  new ResizeObserver(() => job.head && drawTimeline(find("timeline"), job)).observe(find("timeline"));
  if (embedded) return receive(embedded);
  if (location.search) history.replaceState(null, "", location.pathname); // the token stays out of the history
  follow(null);
  setInterval(loadOutput, 2000);
}

begin();
