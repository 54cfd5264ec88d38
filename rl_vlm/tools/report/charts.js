// Charts: drawn from the data of the page, again for each choice of axis, smoothing and scale.
(() => {
  const LEFT = 48, RIGHT = 12, TOP = 8, BOTTOM = 22;
  const UNITS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const hasClock = data.clocks.length > 0 && data.clocks.every((clock, run) => clock.length || !data.training[run]);
  const hasTokens = hasClock && data.clocks.every((clock) => !clock.length || clock[clock.length - 1][2] > 0);
  for (const [value, known] of [["minutes", hasClock], ["tokens", hasTokens]]) {
    if (find("axis") && !known) find("axis").querySelector(`[value=${value}]`).remove();
  }

  function label(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 10000) {
      const [unit, letter] = UNITS.find((one) => size >= one[0]);
      return `${+(value / unit).toPrecision(4)}${letter}`;
    }
    return size < 1e-3 ? value.toExponential(1).replace(".0e", "e") : String(+value.toPrecision(3));
  }

  function roundNumbers(low, high, most) {
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw * (1 - 1e-9));
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i += 1) found.push(+(i * step).toPrecision(12));
    return found;
  }

  // Where a step lies on the axis of minutes or tokens: between the steps whose time is known.
  function place(run, step, axis) {
    if (axis === "step") return step;
    const clock = data.clocks[run], column = axis === "minutes" ? 1 : 2, unit = axis === "minutes" ? 60 : 1;
    let i = clock.findIndex((knot) => knot[0] >= step);
    if (i === 0) return clock[0][column] / unit;
    if (i < 0) i = clock.length - 1;
    const [before, after] = [clock[i - 1] || clock[i], clock[i]];
    const share = after[0] > before[0] ? Math.min(1, (step - before[0]) / (after[0] - before[0])) : 1;
    return (before[column] + share * (after[column] - before[column])) / unit;
  }

  // Exponential moving average, whose first values are not drawn towards 0.
  function smoothed(values, weight) {
    let sum = 0, total = 0;
    return values.map((value) => {
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  function range(values, log) {
    let low = Math.min(...values), high = Math.max(...values);
    if (log) return high > low ? [low, high] : [low / 2, high * 2];
    if ((low >= 0 && low < 0.5 * high) || (low === 0 && high === 0)) return [0, (high || 1) * 1.05];
    const size = high - low || Math.abs(high) || 1;
    return [low - 0.08 * size, high + 0.08 * size];
  }

  function ticks(low, high, log, most) {
    if (!log) return roundNumbers(low, high, most);
    const found = [];
    const factors = high / low < 30 ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      for (const factor of factors) {
        const value = +(factor * 10 ** power).toPrecision(3);
        if (value >= low && value <= high) found.push(value);
      }
    }
    const every = Math.ceil(found.length / most);
    return found.length > 1 ? found.filter((_, i) => i % every === 0) : [low, high];
  }

  function path(points) {
    return points.length ? "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L") : "";
  }

  function draw(figure) {
    const svg = figure.querySelector("svg"), width = svg.clientWidth || 400, height = svg.clientHeight || 190;
    const axis = find("axis").value, weight = Number(find("smooth").value) / 100;
    const chart = data.charts[figure.dataset.chart];
    const isArea = chart.series.some((one) => one.style === "area");
    const flat = chart.series.flatMap((one) => one.points.flatMap((point) => point.slice(1)));
    const log = find("log").checked && !isArea && flat.some((value) => value > 0);
    const series = chart.series.map((one) => {
      const kept = log ? one.points.filter((point) => point[1] > 0) : one.points;
      const smooth = weight > 0 && one.style === "line" ? smoothed(kept.map((point) => point[1]), weight) : null;
      return { ...one, smooth, points: kept.map((point) => ({
        step: point[0], x: place(one.run, point[0], axis), value: point[1],
        low: log && point[2] <= 0 ? point[1] : point[2], high: point[3] })) };
    });
    const points = series.flatMap((one) => one.points);
    const values = points.flatMap((point) => [point.value, point.low, point.high]).filter((value) => value !== undefined);
    const [low, high] = range(values, log);
    const xs = points.map((point) => point.x), first = Math.min(...xs), last = Math.max(...xs) > first ? Math.max(...xs) : first + 1;
    const across = (x) => LEFT + (x - first) / (last - first) * (width - LEFT - RIGHT);
    const share = log ? (y) => Math.log(y / low) / Math.log(high / low) : (y) => (y - low) / (high - low);
    const up = (y) => height - BOTTOM - share(y) * (height - BOTTOM - TOP);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const add = (name, attributes, text) => {
      const made = shape(name, attributes);
      if (text !== undefined) made.textContent = text;
      svg.append(made);
      return made;
    };
    for (const tick of ticks(low, high, log, 5)) {
      add("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: up(tick), y2: up(tick) });
      add("text", { x: LEFT - 6, y: up(tick) + 4, "text-anchor": "end" }, label(tick));
    }
    for (const tick of roundNumbers(first, last, Math.max(2, Math.floor(width / 80)))) {
      if (axis === "step" && !Number.isInteger(tick)) continue;
      add("text", { x: across(tick), y: height - 5, "text-anchor": "middle" }, label(tick));
    }
    for (const one of series) {
      const color = `c${one.color}`, banded = one.points.filter((point) => point.high !== undefined);
      const at = one.points.map((point, i) => [across(point.x), up(one.smooth ? one.smooth[i] : point.value)]);
      if (one.style === "dots") {
        for (const point of banded) add("line", { class: `bar ${color}`, x1: across(point.x), x2: across(point.x), y1: up(point.low), y2: up(point.high) });
      } else if (banded.length > 1) {
        const edge = [...banded.map((point) => [across(point.x), up(point.high)]), ...banded.reverse().map((point) => [across(point.x), up(point.low)])];
        add("path", { class: `band ${one.style} ${color}`, d: `${path(edge)}Z` });
      }
      if (one.smooth) add("path", { class: `line raw ${color}`, d: path(one.points.map((point) => [across(point.x), up(point.value)])) });
      add("path", { class: `line ${one.style} ${color}`, d: path(at) });
      if (one.style === "dots" || at.length === 1) for (const [x, y] of at) add("circle", { class: `dot ${color}`, cx: x, cy: y, r: 3 });
    }
    const cursor = add("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, x1: -9, x2: -9 });
    read(figure, svg, cursor, { axis, series, across, first, last, width });
  }

  // Readings of the values at a step, under the pointer or by the arrow keys
  const readers = new Map();

  function read(figure, svg, cursor, { axis, series, across, first, last, width }) {
    const places = new Map();
    for (const one of series) for (const point of one.points) places.set(point.x, point.step);
    const xs = [...places.keys()].sort((a, b) => a - b), reading = figure.querySelector(".reading");
    let at = -1;
    const show = (index) => {
      at = Math.max(0, Math.min(xs.length - 1, index));
      const x = xs[at];
      cursor.setAttribute("x1", across(x));
      cursor.setAttribute("x2", across(x));
      const found = series.map((one) => {
        const point = one.points.find((other) => other.x === x);
        if (!point) return null;
        return `${one.label || "value"} ${label(point.value - (one.style === "area" ? point.low : 0))}`;
      });
      const where = axis === "step" ? "" : `${label(x)} ${axis}, `;
      reading.textContent = `${where}step ${number(places.get(x), 1)}: ${found.filter(Boolean).join(", ")}`;
    };
    readers.set(svg, {
      hide: () => { reading.textContent = ""; cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); },
      point: (event) => {
        const box = svg.getBoundingClientRect();
        const x = first + ((event.clientX - box.left) / box.width * width - LEFT) / (width - LEFT - RIGHT) * (last - first);
        let nearest = 0;
        xs.forEach((one, i) => { if (Math.abs(one - x) < Math.abs(xs[nearest] - x)) nearest = i; });
        show(nearest);
      },
      key: (event) => {
        const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
        if (!(event.key in moves)) return;
        event.preventDefault();
        show(at < 0 && event.key === "ArrowLeft" ? xs.length - 1 : at + moves[event.key]);
      },
    });
  }

  for (const figure of figures) {
    const svg = figure.querySelector("svg");
    svg.addEventListener("pointermove", (event) => readers.get(svg)?.point(event));
    svg.addEventListener("keydown", (event) => readers.get(svg)?.key(event));
    for (const name of ["pointerleave", "blur"]) svg.addEventListener(name, () => readers.get(svg)?.hide());
  }

  function drawAll() {
    for (const figure of figures) if (figure.querySelector("svg").clientWidth) draw(figure);
  }
  if (figures.length) {
    for (const id of ["axis", "smooth", "log"]) find(id).addEventListener("input", drawAll);
    if (find("internals")) find("internals").addEventListener("toggle", drawAll);
    window.addEventListener("resize", drawAll);
    drawAll();
  }
})();
