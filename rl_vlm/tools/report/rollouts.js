// The rollout browser: filters, the list of groups, and the selected group.
(() => {
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
    const ofTurns = (row.turns || []).flatMap((turn) => [turn.text, ...turn.results.map((result) => result.text)]);
    const texts = [...ofTurns, row.before || "", row.thought || "", row.text, data.prompts[group.prompt], group.id, ...Object.values(group.data)];
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

  // What groups are sorted by. A change is that of the mean reward since the prompt's first group in the same run.

  const ofPrompt = new Map();
  for (const group of data.groups) {
    const key = `${group.heldOut} ${group.id}`;
    if (!ofPrompt.has(key)) ofPrompt.set(key, []);
    ofPrompt.get(key).push(group);
    group.mean = mean(rewards(group));
    group.spread = group.mean === null ? null : Math.sqrt(mean(rewards(group).map((reward) => (reward - group.mean) ** 2)));
  }
  const samePrompt = (group, run) => ofPrompt.get(`${group.heldOut} ${group.id}`).filter((other) => other.run === run);
  for (const groups of ofPrompt.values()) groups.sort((a, b) => a.run - b.run || a.step - b.step);
  for (const group of data.groups) {
    group.change = difference(group, samePrompt(group, group.run)[0]);
    group.between = group.run === 0 ? null : difference(group, counterpart(group, 0));
  }

  function difference(group, other) {
    return other === undefined || other === group || group.mean === null || other.mean === null ? null : group.mean - other.mean;
  }

  // The same prompt in another run: at the same step, or else at its last one.
  function counterpart(group, run) {
    const others = samePrompt(group, run);
    return others.find((other) => other.step === group.step) || others[others.length - 1];
  }

  const SORTS = [
    ["between", "most different between runs", (group) => group.between === null ? null : -Math.abs(group.between)],
    ["changed", "most changed", (group) => group.change === null ? null : -Math.abs(group.change)],
    ["regressed", "most regressed", (group) => group.change],
    ["worst", "lowest reward", (group) => group.mean],
    ["spread", "largest spread of rewards", (group) => group.spread === null ? null : -group.spread],
    ["steps", "step", (group) => group.step],
  ];
  for (const [value, label, key] of SORTS) {
    if (value === "steps" || data.groups.some((group) => key(group))) find("sort").append(new Option(label, value));
  }

  function sorted(groups) {
    const key = SORTS.find((one) => one[0] === find("sort").value)[2];
    if (key === SORTS[SORTS.length - 1][2]) return groups;
    const rank = (group) => key(group) === null ? Infinity : key(group);
    return [...groups].sort((a, b) => {
      const [x, y] = [rank(a), rank(b)];
      return (x === y ? 0 : x - y) || hasImage(b) - hasImage(a) || b.step - a.step;
    });
  }

  // The images of a prompt are kept by some runs of a comparison, and not by others.
  function withImages(group) {
    const isSame = (other) => other.prompt === group.prompt && String(other.sizes) === String(group.sizes) && hasImage(other);
    return hasImage(group) ? group : ofPrompt.get(`${group.heldOut} ${group.id}`).find(isSame) || group;
  }
  const imagesOf = (group) => withImages(group).images;
  const videosOf = (group) => withImages(group).videos;

  // List of groups

  const PAGE = 100;  // groups in the list, before "Show more"
  const isNarrow = matchMedia("(max-width: 40rem)").matches;
  const MOST = isNarrow ? 3 : 8;  // completions of a group, before "Show all"
  const anyImage = data.groups.some(hasImage);
  let matching = [], listed = 0, selected = null, completion = 0, shown = null, items = [], want = wanted();

  const place = (group) => [
    several ? data.runs[group.run] : null, data.training[group.run] ? `step ${group.step}` : null,
    group.heldOut ? "held out" : null,
  ].filter(Boolean);

  function button(group) {
    const strip = element("span", { class: "strip", "aria-hidden": "true" });
    const lowest = Math.min(0, ...rewards(group)), highest = Math.max(1, ...rewards(group));
    for (const row of group.rows.slice(0, 64)) {
      const cell = element("i");
      cell.style.opacity = row.reward === null ? "0" : String(0.08 + 0.92 * (row.reward - lowest) / (highest - lowest));
      strip.append(cell);
    }
    const image = [...imagesOf(group), ...videosOf(group).map((video) => video.strip)].find((one) => one !== null);
    const thumbnail = image === undefined
      ? element("span", { class: "thumb" })
      : element("img", { class: "thumb", src: data.images[image], alt: "", loading: "lazy", decoding: "async" });
    const moved = find("sort").value === "between" ? group.between : group.change;
    const made = element("button", { type: "button" },
      anyImage ? thumbnail : null,
      element("span", { class: "row" },
        element("span", { class: "id" }, group.id),
        element("span", {}, number(group.mean, 2)),
        element("span", { class: "sub" }, [...place(group), group.source].filter(Boolean).join(" · ")),
        element("span", { class: `sub ${moved > 0 ? "up" : moved < 0 ? "down" : ""}` }, moved ? signed(+moved.toFixed(2)) : ""),
        strip));
    made.addEventListener("click", () => choose(group));
    return element("li", {}, made);
  }

  function list() {
    want = wanted();
    matching = sorted(data.groups.filter((group) => groupFits(group, want)));
    listed = 0;
    find("groups").replaceChildren();
    more();
    find("count").textContent = `${matching.length.toLocaleString("en")} group${matching.length === 1 ? "" : "s"}`;
    select(matching.includes(selected) ? selected : matching.slice(0, PAGE).find(hasImage) || matching[0] || null);
  }

  function more() {
    const next = matching.slice(listed, listed + PAGE);
    find("groups").append(...next.map(button));
    listed += next.length;
    find("more").hidden = listed >= matching.length;
  }

  function select(group, focus = false) {
    if (group !== selected) { completion = 0; isWhole = false; }
    selected = group;
    while (group && matching.indexOf(group) >= listed) more();
    [...find("groups").children].forEach((item, i) => {
      const made = item.firstChild, current = matching[i] === group;
      made.setAttribute("aria-current", String(current));
      made.tabIndex = current ? 0 : -1;
      if (current) {
        if (focus) made.focus({ preventScroll: true });
        const box = find("groups"), top = item.offsetTop - box.offsetTop;
        if (top < box.scrollTop) box.scrollTop = top;
        if (top + item.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = top + item.offsetHeight - box.clientHeight;
      }
    });
    showGroup();
  }

  // A person chose this group: the address of the page names it from now on.
  function choose(group, focus = false) {
    select(group, focus);
    try {
      history.replaceState(null, "", address(group));
    } catch {  // a page without an address of its own, as in a notebook
      return;
    }
  }

  function move(by, focus) {
    const at = matching.indexOf(selected);
    const next = matching[Math.max(0, Math.min(matching.length - 1, at + by))];
    if (next) choose(next, focus);
  }

  // Links to groups

  function address(group) {
    return `#group=${[data.runs[group.run], group.step, part(group) || "evaluation", group.id].map(encodeURIComponent).join("/")}`;
  }

  function openLinked() {
    if (!location.hash.startsWith("#group=")) return;
    const group = data.groups.find((one) => address(one) === location.hash);
    find("lost").hidden = group !== undefined;
    if (group) {
      if (!matching.includes(group)) { find("filters").reset(); list(); }
      select(group);
    }
    (group ? find("group") : find("rollouts")).scrollIntoView();
  }

  // The selected group

  let isWhole = false, against = null;

  function showGroup() {
    const article = find("group"), group = selected;
    items = [];
    if (!group) {
      article.replaceChildren(element("p", { class: "quiet" }, "No group fits the filters."));
      return;
    }
    shown = group;
    const whole = element("button", { type: "button", class: "whole" });
    const others = several ? data.runs.map((_, run) => run).filter((run) => run !== group.run && samePrompt(group, run).length) : [];
    const other = others.length ? counterpart(group, others.includes(against) ? against : others[0]) : null;
    const most = Math.max(group.rows.length, other ? other.rows.length : 0), images = pictures(group);
    article.replaceChildren(
      element("h3", {}, [group.id, ...place(group)].join(" · "), " ", element("a", { class: "link", href: address(group) }, "link")),
      ...videosOf(group).map((video, i) => strip(group, video, i)),
      element("div", { class: "top" }, images.hasChildNodes() ? images : null, element("div", {},
        element("div", { class: "prompt", tabindex: "0", "aria-label": "Prompt" }, data.prompts[group.prompt]),
        facts(group))),
      other ? element("div", { class: "sides" }, side(group), side(other, others)) : completions(group),
      ...(most > MOST && !isWhole ? [whole] : []),
      ...overTime(group));
    whole.textContent = `Show all ${most} completions`;
    whole.addEventListener("click", () => { isWhole = true; showGroup(); });
    mark();
  }

  function completions(group) {
    const some = isWhole ? group.rows : group.rows.slice(0, MOST);
    return element("ol", { class: "completions", "aria-label": "Completions" }, ...some.map((row, i) => completionItem(group, row, i)));
  }

  // One of two runs side by side. The other run can be chosen if there are several.
  function side(group, others = []) {
    const name = data.runs[group.run];
    const select = element("select", { "aria-label": "Compare with" }, ...others.map((run) => new Option(data.runs[run], run, false, run === group.run)));
    select.addEventListener("change", () => { against = Number(select.value); showGroup(); });
    const summary = [data.training[group.run] ? `step ${group.step}` : null, `mean reward ${number(group.mean)}`];
    return element("section", { class: "side", "aria-label": name },
      element("h4", {}, element("span", { class: `key c${group.run % 8}` }), others.length > 1 ? select : name,
        element("span", { class: "quiet" }, ` ${summary.filter(Boolean).join(" · ")}`)),
      completions(group));
  }

  function facts(group) {
    const found = element("dl", { class: "data" });
    for (const [name, value] of Object.entries(group.data)) found.append(element("dt", {}, name), element("dd", {}, value));
    return found;
  }

  function pictures(group) {
    const made = element("div");
    const images = imagesOf(group);
    images.forEach((image, i) => {
      if (image === null) return;
      const size = group.sizes[i] || [0, 0];
      const picture = element("img", { src: data.images[image], alt: `Image ${i + 1} of ${group.id}`, class: Math.max(...size) <= 64 ? "tiny" : "" });
      const canvas = element("div", { class: "canvas" }, picture);
      if (i === group.boxed && size[0]) canvas.append(shape("svg", { viewBox: `0 0 ${size[0]} ${size[1]}`, id: "regions", "aria-hidden": "true" }));
      made.append(element("figure", { class: "picture" }, canvas));
    });
    if (group.noImage && images === group.images) made.append(element("p", { class: "quiet" }, "The image of this prompt is not kept."));
    if (group.gold.length || group.rows.some((row) => row.regions.length)) made.append(legend("whose"));
    return made;
  }

  const legend = (id) => element("p", { class: "legend" },
    element("span", {}, element("span", { class: "key gold" }), "true"),
    element("span", {}, element("span", { class: "key predicted" }), element("span", { id }, "predicted")));

  // A video: frames with their times, and below the first one the true and the predicted intervals.
  function strip(group, video, i) {
    const hasIntervals = i === 0 && (group.goldIntervals.length || group.rows.some((row) => row.intervals.length));
    const seconds = (at) => `${number(at, 1)} s`;
    const frames = video.strip === null
      ? element("p", { class: "quiet" }, "The video of this prompt is not kept.")
      : element("img", { src: data.images[video.strip], alt: `Frames of video ${i + 1} of ${group.id}, from ${seconds(video.from)} to ${seconds(video.to)}` });
    const made = element("div", { class: "film" }, frames);
    if (!hasIntervals) return element("figure", { class: "video", tabindex: "0", "aria-label": `Video ${i + 1}` }, made);
    made.append(element("div", { id: "intervals" }),
      element("div", { class: "axis quiet" }, element("span", {}, seconds(video.from)), element("span", {}, seconds(video.to))));
    return element("figure", { class: "video", tabindex: "0", "aria-label": "Video 1 with intervals" }, made, legend("whose-intervals"));
  }

  // Draw the true intervals of the selected group, and those of the selected completion, as bars.
  function drawIntervals(group) {
    const bars = find("intervals");
    if (!bars) return;
    const video = videosOf(group)[0], row = shown.rows[completion];
    const place = (at) => 100 * Math.max(0, Math.min(1, (at - video.from) / (video.to - video.from || 1)));
    bars.replaceChildren(...[["gold", group.goldIntervals], ["predicted", row ? row.intervals : []]].map(([kind, intervals]) => {
      const words = intervals.map(([start, end]) => start === end ? `${start} s` : `${start} to ${end} s`).join(", ");
      const bar = element("div", { class: "bar-of", role: "img", "aria-label": `${kind === "gold" ? "true" : "predicted"}: ${words || "none"}` });
      for (const [start, end] of intervals) {
        const one = element("span", { class: kind, title: start === end ? `${start} s` : `${start} to ${end} s` });
        one.style.left = `${place(start)}%`;
        one.style.width = `${place(end) - place(start)}%`;
        bar.append(one);
      }
      return bar;
    }));
    showWhose("whose-intervals", row && row.intervals.length);
  }

  function showWhose(id, isDrawn) {
    const whose = find(id);
    if (whose) whose.textContent = `predicted by ${shown === selected ? "" : `${data.runs[shown.run]} `}#${completion}${isDrawn ? "" : " (none)"}`;
  }

  // Draw the true regions of the selected group, and those of the selected completion, which may be another run's.
  function drawRegions(group) {
    const svg = find("regions");
    if (!svg) return;
    svg.replaceChildren();
    const size = group.sizes[group.boxed], radius = Math.max(...size) / 60;
    const row = shown.rows[completion];
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
    showWhose("whose", row && row.regions.length);
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
        row.turns ? figure("turns", String(row.turns.length)) : null,
        row.tokens === null ? null : figure("tokens", String(row.tokens))),
      ...(hasFrames(row) ? framesAndText(group, row, i) : turnsAndText(row)));
    if (row.fault) item.append(element("p", { class: "fault" }, row.fault));
    if (Object.keys(row.logged).length) {
      const logged = element("dl", { class: "data" });
      for (const [name, value] of Object.entries(row.logged)) logged.append(element("dt", {}, name), element("dd", {}, value));
      item.append(element("details", {}, element("summary", {}, "logged by reward functions"), logged));
    }
    const pick = () => { shown = group; completion = i; mark(); };
    item.addEventListener("click", pick);
    item.addEventListener("focusin", pick);
    items.push({ item, group, i });
    return item;
  }

  // Turns with images are a strip of frames. All of their texts are folded.
  const hasFrames = (row) => (row.turns || []).some((turn) => turn.results.some(numImages));
  const numImages = (result) => result.images.length + result.left;

  function framesAndText(group, row, i) {
    return [frames(group, row, i),
      element("details", {}, element("summary", {}, `${row.turns.length} turn${row.turns.length === 1 ? "" : "s"} in full`), ...row.turns.map(turnItem)),
      ...completionText(row)];
  }

  function turnsAndText(row) {
    return [...(row.turns || []).slice(0, -1).map(turnItem), ...completionText(row),
      ...(row.turns || []).slice(-1).flatMap((turn) => [
        turnFigures(turn) ? element("p", { class: "quiet" }, `last turn: ${turnFigures(turn)}`) : "", ...turn.results.map(resultItem)])];
  }

  // What the model saw before each turn, with what it then did, and last what it did not see any more.
  function frames(group, row, i) {
    const start = row.start || imagesOf(group), kept = start.filter((image) => image !== null);
    const first = { images: kept, left: Math.max(start.length, (group.sizes || []).length) - kept.length };
    const seen = [[first], ...row.turns.map((turn) => turn.results)];
    const cells = row.turns.map((turn, k) => frame(seen[k], k, turn, row.parting && row.parting.turn === k ? partingWords(row, group) : null));
    const last = seen[row.turns.length];
    if (last.some(numImages)) cells.push(frame(last, row.turns.length, null, null));
    const isBare = !seen.flat().some((result) => result.images.length);
    return element("ol", { class: isBare ? "frames bare" : "frames", tabindex: "0", "aria-label": `Frames of completion ${i}` }, ...cells);
  }

  function partingWords(row, group) {
    const names = row.parting.from;
    if (names.length === group.rows.length - 1) return "parts from all others";
    return `parts from ${names.slice(0, 3).map((other) => `#${other}`).join(", ")}${names.length > 3 ? ` and ${names.length - 3} more` : ""}`;
  }

  const MOST_SEEN = 3, MOST_ACTION = 60;  // images of a frame, characters of an action
  function frame(results, k, turn, parting) {
    const images = results.flatMap((result) => result.images), left = results.reduce((sum, result) => sum + result.left, 0);
    const more = images.length - MOST_SEEN + left;
    const words = images.length ? (more > 0 ? `+${more}` : "") : left ? "not kept" : "no image";
    const pictures = element("div", { class: "seen" },
      ...images.slice(0, MOST_SEEN).map((image) => element("img", { src: data.images[image], alt: `Frame ${k + 1}`, loading: "lazy", decoding: "async" })),
      words ? element("span", { class: "quiet" }, words) : null);
    const cell = element("li", { class: parting ? "parting" : "" }, pictures);
    if (turn === null) {
      cell.append(element("span", { class: "quiet" }, "at the end"));
      return cell;
    }
    const text = turn.text.trim().replace(/\s+/g, " ");
    cell.append(element("span", { class: "action", title: turn.text }, text.length > MOST_ACTION ? "…" + text.slice(-MOST_ACTION) : text || "(empty)"),
      ...[["reward", number], ["advantage", signed]].filter(([name]) => turn[name] !== undefined).map(([name, format]) =>
        element("span", { class: "quiet" }, `${name} `, element("b", { class: turn[name] > 0 ? "up" : turn[name] < 0 ? "down" : "" }, format(turn[name])))));
    if (turn.results.some((result) => result.failed)) cell.append(element("b", { class: "failed" }, "error"));
    if (parting) cell.append(element("b", { class: "parts" }, parting));
    return cell;
  }

  // The reward and the advantage of a turn, if it has them.
  function turnFigures(turn) {
    const figures = [["reward", number], ["advantage", signed]].filter(([name]) => turn[name] !== undefined);
    return figures.map(([name, format]) => `${name} ${format(turn[name])} `).join("");
  }

  // A turn of the model and the results of its calls, folded.
  function turnItem(turn, i) {
    const failed = turn.results.some((result) => result.failed);
    const summary = element("summary", {}, `turn ${i + 1}${turn.calls.length ? ": " + turn.calls.join(", ") : ""} `,
      turnFigures(turn),
      failed ? element("b", { class: "failed" }, "error") : "");
    return element("details", { class: "turn" }, summary, element("div", { class: "text" }, turn.text || "(empty)"), ...turn.results.map(resultItem));
  }

  function resultItem(result) {
    const left = result.left ? element("p", { class: "quiet" }, `${result.left} image${result.left === 1 ? "" : "s"}, not kept`) : null;
    return element("div", { class: result.failed ? "result failed" : "result" },
      ...result.images.map((image) => element("img", { src: data.images[image], alt: "Observed image" })), left,
      result.text ? element("div", { class: "text" }, result.text) : null);
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
    const others = ofPrompt.get(`${group.heldOut} ${group.id}`);
    if (others.length < 2) return [];
    const table = element("table", {}, element("thead", {}, element("tr", {},
      several ? element("th", { scope: "col" }, "run") : null, element("th", { scope: "col", class: "number" }, "step"),
      element("th", { scope: "col", class: "number" }, "mean reward"), element("th", { scope: "col", class: "number" }, "best"),
      element("th", { scope: "col" }, "a completion"))));
    const body = element("tbody");
    for (const other of others) {
      const go = element("button", { type: "button", "aria-label": `Show step ${other.step}` }, String(other.step));
      go.addEventListener("click", () => { if (!matching.includes(other)) { find("filters").reset(); list(); } choose(other); });
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
    for (const { item, group, i } of items) {
      const isCurrent = group === shown && i === completion;
      item.setAttribute("aria-current", String(isCurrent));
      if (focus && isCurrent) item.focus();
    }
    if (selected) {
      drawRegions(selected);
      drawIntervals(selected);
    }
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
      const next = Math.max(0, Math.min(shown.rows.length - 1, completion + by)), of = shown;
      if (next >= MOST && !isWhole) { isWhole = true; showGroup(); }
      shown = of;
      completion = next;
      mark(true);
    }
  });
  find("filters").addEventListener("input", list);
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("filters").addEventListener("reset", () => setTimeout(list));
  find("sort").addEventListener("input", () => { selected = null; list(); });
  find("more").addEventListener("click", more);
  window.addEventListener("hashchange", openLinked);
  for (const made of document.querySelectorAll(".find")) {
    made.addEventListener("click", () => {
      find("filters").reset();
      find("f-text").value = made.dataset.find;
      list();
      find("rollouts").scrollIntoView();
    });
  }
  list();
  openLinked();
})();
