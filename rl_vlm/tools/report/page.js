"use strict";
// The rollout browser and the readings of charts. All text of a run is set as textContent, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const PAGE = 100;  // groups in the list, before "Show more"

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") made.className = value; else made.setAttribute(key, value);
    }
    for (const child of children) {
      if (child !== null && child !== undefined) made.append(child);
    }
    return made;
  }

  function shape(name, attributes) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  const number = (value, digits = 3) => value === null || value === undefined ? "–" : String(+value.toFixed(digits));
  const signed = (value) => value === null ? "–" : (value > 0 ? "+" : "") + number(value);
  const mean = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  const part = (group) => data.training[group.run] ? (group.heldOut ? "held out" : "training") : "";
  const hasImage = (group) => group.images.some((image) => image !== null);
  const rewards = (group) => group.rows.map((row) => row.reward).filter((reward) => reward !== null);

  // Charts

  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    const chart = JSON.parse(svg.dataset.chart);
    const reading = svg.parentElement.querySelector(".reading");
    const cursor = svg.querySelector(".cursor");
    const steps = [...new Set(chart.series.flatMap((series) => series.points.map((point) => point[0])))].sort((a, b) => a - b);
    const [low, high] = chart.steps;
    let at = -1;
    const show = (index) => {
      at = Math.max(0, Math.min(steps.length - 1, index));
      const step = steps[at];
      const x = 46 + (step - low) / (high - low) * (400 - 56);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      const values = chart.series.map((series) => {
        const point = series.points.find((one) => one[0] === step);
        return point ? `${series.label} ${point[1]}` : null;
      });
      reading.textContent = `step ${number(step, 1)}: ${values.filter(Boolean).join(", ")}`;
    };
    const hide = () => { reading.textContent = ""; cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const step = low + ((event.clientX - box.left) / box.width * 400 - 46) / (400 - 56) * (high - low);
      let nearest = 0;
      steps.forEach((one, i) => { if (Math.abs(one - step) < Math.abs(steps[nearest] - step)) nearest = i; });
      show(nearest);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(at < 0 && event.key === "ArrowLeft" ? steps.length - 1 : at + moves[event.key]);
    });
  }

  // Filters

  const several = data.runs.length > 1;
  for (const hidden of document.querySelectorAll(".only-several")) hidden.hidden = !several;
  function options(select, all, values) {
    select.append(new Option(all, ""));
    for (const [value, label] of values) select.append(new Option(label, value));
    select.closest("label").hidden = select.closest("label").hidden || values.length < 2;
  }
  const distinct = (values) => [...new Set(values)];
  options(find("f-run"), "all", data.runs.map((name, i) => [i, name]));
  const parts = distinct(data.groups.map((group) => part(group))).filter(Boolean);
  options(find("f-part"), "all", parts.map((name) => [name, name]));
  options(find("f-step"), "all", distinct(data.groups.map((group) => group.step)).sort((a, b) => a - b).map((step) => [step, step]));
  options(find("f-source"), "all", distinct(data.groups.map((group) => group.source).filter((source) => source !== null)).sort().map((source) => [source, source]));
  options(find("f-end"), "all", distinct(data.groups.flatMap((group) => group.rows.map((row) => row.end))).sort().map((end) => [end, end]));
  const names = distinct(data.names.flat());
  find("f-score").append(new Option("reward", ""));
  for (const name of names) find("f-score").append(new Option(name, name));
  if (!data.groups.some(hasImage)) find("f-image").closest("label").hidden = true;
  if (!data.groups.some((group) => group.rows.some((row) => row.fault))) find("f-fault").closest("label").hidden = true;

  const left = data.numAll - data.numShown;
  find("shown").textContent = data.numAll === 0
    ? "No completion is recorded (log.log_completions)."
    : `${data.numShown.toLocaleString("en")} of ${data.numAll.toLocaleString("en")} completions are shown` +
      (left ? ", from all parts of the run; the others are in the parquet files." : ".") +
      (data.numImagesLeftOut ? ` ${data.numImagesLeftOut} more images are left out.` : "") +
      (data.numUnread ? ` Boxes of ${data.numUnread.toLocaleString("en")} completions are not drawn: reading all takes too long.` : "");

  function wanted() {
    const value = (id) => find(id).value;
    const bound = (id) => value(id) === "" ? null : Number(value(id));
    return {
      run: value("f-run"), part: value("f-part"), step: value("f-step"), source: value("f-source"), end: value("f-end"),
      score: value("f-score"), low: bound("f-low"), high: bound("f-high"), text: value("f-text").toLowerCase(),
      image: find("f-image").checked, fault: find("f-fault").checked,
    };
  }

  function fits(group, row, want) {
    if (want.end && row.end !== want.end) return false;
    if (want.fault && !row.fault) return false;
    if (want.low !== null || want.high !== null) {
      const score = want.score ? row.scores[data.names[group.run].indexOf(want.score)] : row.reward;
      if (score === null || score === undefined) return false;
      if (want.low !== null && score < want.low) return false;
      if (want.high !== null && score > want.high) return false;
    }
    if (!want.text) return true;
    const texts = [row.before || "", row.thought || "", row.text, data.prompts[group.prompt], group.id, ...Object.values(group.data)];
    return texts.some((text) => text.toLowerCase().includes(want.text));
  }

  function groupFits(group, want) {
    if (want.run !== "" && group.run !== Number(want.run)) return false;
    if (want.part && part(group) !== want.part) return false;
    if (want.step !== "" && group.step !== Number(want.step)) return false;
    if (want.source && group.source !== want.source) return false;
    if (want.image && !hasImage(group)) return false;
    return group.rows.some((row) => fits(group, row, want));
  }

  // List of groups

  let matching = [], listed = 0, selected = null, completion = 0, want = wanted();

  function button(group) {
    const strip = element("span", { class: "strip", "aria-hidden": "true" });
    const lowest = Math.min(0, ...rewards(group)), highest = Math.max(1, ...rewards(group));
    for (const row of group.rows.slice(0, 64)) {
      const cell = element("i");
      cell.style.opacity = row.reward === null ? "0" : String(0.08 + 0.92 * (row.reward - lowest) / (highest - lowest));
      strip.append(cell);
    }
    const sub = [several ? data.runs[group.run] : null, data.training[group.run] ? `step ${group.step}` : null, group.heldOut ? "held out" : null, group.source];
    const made = element("button", { type: "button" },
      element("span", { class: "id" }, group.id),
      element("span", {}, number(mean(rewards(group)), 2)),
      element("span", { class: "sub" }, sub.filter(Boolean).join(" · ")),
      element("span", { class: "sub" }, hasImage(group) ? "image" : ""),
      strip);
    made.addEventListener("click", () => select(group));
    return element("li", {}, made);
  }

  function list() {
    want = wanted();
    matching = data.groups.filter((group) => groupFits(group, want));
    listed = 0;
    find("groups").replaceChildren();
    more();
    find("count").textContent = `${matching.length.toLocaleString("en")} group${matching.length === 1 ? "" : "s"}`;
    select(matching.includes(selected) ? selected : matching[0] || null);
  }

  function more() {
    const next = matching.slice(listed, listed + PAGE);
    find("groups").append(...next.map(button));
    listed += next.length;
    find("more").hidden = listed >= matching.length;
  }

  function select(group, focus = false) {
    if (group !== selected) completion = 0;
    selected = group;
    while (group && matching.indexOf(group) >= listed) more();
    [...find("groups").children].forEach((item, i) => {
      const made = item.firstChild, current = matching[i] === group;
      made.setAttribute("aria-current", String(current));
      made.tabIndex = current ? 0 : -1;
      if (current) {
        if (focus) made.focus();
        made.scrollIntoView({ block: "nearest", container: "nearest" });
      }
    });
    showGroup();
  }

  function move(by, focus) {
    const at = matching.indexOf(selected);
    const next = matching[Math.max(0, Math.min(matching.length - 1, at + by))];
    if (next) select(next, focus);
  }

  // The selected group

  function showGroup() {
    const place = find("group"), group = selected;
    if (!group) {
      place.replaceChildren(element("p", { class: "quiet" }, "No group fits the filters."));
      return;
    }
    const title = [group.id, several ? data.runs[group.run] : null, data.training[group.run] ? `step ${group.step}` : null, group.heldOut ? "held out" : null];
    place.replaceChildren(
      element("h3", {}, title.filter(Boolean).join(" · ")),
      element("div", { class: "top" }, pictures(group), element("div", {},
        element("div", { class: "prompt", tabindex: "0", "aria-label": "Prompt" }, data.prompts[group.prompt]),
        facts(group))),
      element("ol", { class: "completions", "aria-label": "Completions" }, ...group.rows.map((row, i) => completionItem(group, row, i))),
      ...overTime(group));
    mark();
  }

  function facts(group) {
    const found = element("dl", { class: "data" });
    for (const [name, value] of Object.entries(group.data)) found.append(element("dt", {}, name), element("dd", {}, value));
    return found;
  }

  function pictures(group) {
    const place = element("div");
    group.images.forEach((image, i) => {
      if (image === null) return;
      const size = group.sizes[i] || [0, 0];
      const shown = element("img", { src: data.images[image], alt: `Image ${i + 1} of ${group.id}`, class: Math.max(...size) <= 64 ? "tiny" : "" });
      const canvas = element("div", { class: "canvas" }, shown);
      if (i === group.boxed && size[0]) canvas.append(shape("svg", { viewBox: `0 0 ${size[0]} ${size[1]}`, id: "regions", "aria-hidden": "true" }));
      place.append(element("figure", { class: "picture" }, canvas));
    });
    if (group.noImage) place.append(element("p", { class: "quiet" }, "The image of this prompt is not kept."));
    if (group.gold.length || group.rows.some((row) => row.regions.length)) {
      place.append(element("p", { class: "legend" },
        element("span", {}, element("span", { class: "key gold" }), "true"),
        element("span", {}, element("span", { class: "key predicted" }), element("span", { id: "whose" }, "predicted"))));
    }
    return place;
  }

  function drawRegions(group) {
    const svg = find("regions");
    if (!svg) return;
    svg.replaceChildren();
    const size = group.sizes[group.boxed], radius = Math.max(...size) / 60;
    const row = group.rows[completion];
    for (const [kind, regions] of [["gold", group.gold], ["predicted", row ? row.regions : []]]) {
      for (const region of regions) {
        for (const layer of ["halo", kind]) {
          const [x, y, right, bottom] = region.at;
          const made = region.at.length === 4
            ? shape("rect", { x, y, width: right - x, height: bottom - y })
            : shape("circle", { cx: x, cy: y, r: radius });
          made.setAttribute("class", `region ${layer}`);
          svg.append(made);
        }
      }
    }
    const whose = find("whose");
    if (whose) whose.textContent = `predicted by #${completion}${row && row.regions.length ? "" : " (none)"}`;
  }

  function completionItem(group, row, i) {
    const figure = (name, value) => element("span", {}, `${name} `, element("b", {}, value));
    const item = element("li", { class: fits(group, row, want) ? "completion" : "completion unfit", tabindex: "-1" },
      element("div", { class: "figures" },
        element("span", {}, `#${i}`),
        figure("reward", number(row.reward)),
        ...data.names[group.run].map((name, f) => figure(name, number(row.scores[f]))),
        part(group) === "training" ? figure("advantage", signed(row.advantage)) : null,
        figure("finish", row.end),
        row.tokens === null ? null : figure("tokens", String(row.tokens))),
      ...completionText(row));
    if (row.fault) item.append(element("p", { class: "fault" }, row.fault));
    if (Object.keys(row.logged).length) {
      const logged = element("dl", { class: "data" });
      for (const [name, value] of Object.entries(row.logged)) logged.append(element("dt", {}, name), element("dd", {}, value));
      item.append(element("details", {}, element("summary", {}, "logged by reward functions"), logged));
    }
    const choose = () => { completion = i; mark(); };
    item.addEventListener("click", choose);
    item.addEventListener("focusin", choose);
    return item;
  }

  function completionText(row) {
    if (row.thought === undefined) return [element("div", { class: "text" }, row.text || "(empty)")];
    return [
      row.before ? element("div", { class: "text" }, row.before) : null,
      element("details", { class: "thinking" }, element("summary", {}, `thinking (${row.thoughtLength.toLocaleString("en")} characters)`), element("div", { class: "text" }, row.thought)),
      element("div", { class: "text" }, row.text || "(nothing after the thinking)"),
    ].filter(Boolean);
  }

  function overTime(group) {
    const others = data.groups.filter((other) => other.id === group.id && other.heldOut === group.heldOut);
    if (others.length < 2) return [];
    const table = element("table", {}, element("thead", {}, element("tr", {},
      several ? element("th", { scope: "col" }, "run") : null, element("th", { scope: "col", class: "number" }, "step"),
      element("th", { scope: "col", class: "number" }, "mean reward"), element("th", { scope: "col", class: "number" }, "best"),
      element("th", { scope: "col" }, "a completion"))));
    const body = element("tbody");
    for (const other of others.sort((a, b) => a.run - b.run || a.step - b.step)) {
      const go = element("button", { type: "button", "aria-label": `Show step ${other.step}` }, String(other.step));
      go.addEventListener("click", () => { if (!matching.includes(other)) find("filters").reset(); list(); select(other); });
      const last = other.rows[0].text.replace(/\s+/g, " ");
      body.append(element("tr", {},
        several ? element("td", {}, data.runs[other.run]) : null,
        element("td", { class: "number" }, other === group ? `${other.step} (this)` : go),
        element("td", { class: "number" }, number(mean(rewards(other)))),
        element("td", { class: "number" }, number(rewards(other).length ? Math.max(...rewards(other)) : null)),
        element("td", { class: "wide" }, last.length > 160 ? "…" + last.slice(-160) : last)));
    }
    table.append(body);
    return [element("h3", {}, several ? "This prompt in all runs" : "This prompt over time"),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "This prompt over time" }, table)];
  }

  function mark(focus = false) {
    [...document.querySelectorAll(".completion")].forEach((item, i) => {
      item.setAttribute("aria-current", String(i === completion));
      if (focus && i === completion) item.focus();
    });
    if (selected) drawRegions(selected);
  }

  // Keys

  find("groups").addEventListener("keydown", (event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    move(moves[event.key], true);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    if (event.key === "j") move(1, true);
    if (event.key === "k") move(-1, true);
    const by = { n: 1, p: -1 }[event.key];
    if (by && selected) {
      completion = Math.max(0, Math.min(selected.rows.length - 1, completion + by));
      mark(true);
    }
  });
  find("filters").addEventListener("input", list);
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("filters").addEventListener("reset", () => setTimeout(list));
  find("more").addEventListener("click", more);
  for (const made of document.querySelectorAll(".find")) {
    made.addEventListener("click", () => {
      find("filters").reset();
      find("f-text").value = made.dataset.find;
      list();
      find("rollouts").scrollIntoView();
    });
  }
  list();
})();
