// The timeline and the memory of a report: two canvases over one stretch of time. Wheel zooms, dragging moves, a double
// click shows the whole step; the pointer says what it is on.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!data.lanes) return;
  const LEFT = 150, AXIS = 22, TALL = 26, THIN = 9, GAP = 8, MEMORY = 220;
  const GIB = 2 ** 30;
  const tip = document.getElementById("tip");
  const all = { from: 0, to: data.end };
  let view = { ...all }, streams = document.getElementById("streams").checked;

  const seconds = (s) => {
    const size = Math.abs(s);
    if (size >= 1 || size === 0) return `${+s.toPrecision(4)} s`;
    return size >= 1e-3 ? `${+(s * 1e3).toPrecision(4)} ms` : `${+(s * 1e6).toPrecision(3)} us`;
  };

  // Lanes that run anything, with their place from the top; those of one row stand together.
  const layout = () => {
    let y = AXIS, row = -1;
    const lanes = [];
    for (const lane of data.lanes) {
      if (!lane.events.length || (lane.stream !== "compute" && !streams)) continue;
      if (lane.row !== row) { y += row < 0 ? 0 : GAP; row = lane.row; }
      const height = lane.stream === "compute" ? TALL : THIN;
      lanes.push({ ...lane, y, height });
      y += height + 1;
    }
    return { lanes, height: y + 6 };
  };
  let placed = layout();

  const open = (id, height) => {
    const canvas = document.getElementById(id), ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    return { pen, width };
  };
  const scale = (width) => (width - LEFT - 12) / (view.to - view.from);
  const place = (t, width) => LEFT + (t - view.from) * scale(width);
  const time = (x, width) => view.from + (x - LEFT) / scale(width);

  const axis = (pen, width, height) => {
    const rough = (view.to - view.from) / 9, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((f) => power * f >= rough);
    pen.strokeStyle = "#e3e7eb";
    pen.fillStyle = "#5b6570";
    pen.textAlign = "center";
    for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
      const x = place(k * step, width);
      pen.beginPath(); pen.moveTo(x, AXIS - 5); pen.lineTo(x, height); pen.stroke();
      pen.fillText(seconds(k * step), x, 8);
    }
    const x = place(data.period, width);
    if (x >= LEFT && x <= width) {
      pen.strokeStyle = "#c0392b"; pen.setLineDash([4, 3]);
      pen.beginPath(); pen.moveTo(x, AXIS - 5); pen.lineTo(x, height); pen.stroke();
      pen.setLineDash([]);
    }
  };

  // First event that ends after a time: events of a lane follow one another.
  const first = (events, t) => {
    let low = 0, high = events.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (events[middle][0] + events[middle][1] <= t) low = middle + 1; else high = middle;
    }
    return low;
  };

  const drawTimeline = () => {
    const { pen, width } = open("timeline", placed.height);
    axis(pen, width, placed.height);
    let row = -1;
    for (const lane of placed.lanes) {
      const { y, height } = lane, tall = height === TALL;
      pen.textAlign = "left";
      pen.fillStyle = "#1b1f24";
      if (lane.row !== row) { row = lane.row; pen.font = "bold 12px system-ui, sans-serif"; pen.fillText(`row ${row}`, 2, y + height / 2); }
      pen.font = tall ? "11px system-ui, sans-serif" : "8px system-ui, sans-serif";
      pen.fillStyle = "#5b6570"; pen.textAlign = "right";
      if (!tall) pen.fillText(lane.stream, LEFT - 6, y + height / 2);
      pen.fillStyle = "#f4f6f8";
      pen.fillRect(LEFT, y, width - LEFT - 12, height);
      pen.save();
      pen.beginPath(); pen.rect(LEFT, y, width - LEFT - 12, height); pen.clip();
      pen.textAlign = "center";
      for (let i = first(lane.events, view.from); i < lane.events.length && lane.events[i][0] < view.to; i++) {
        const [start, lasts, text, kind] = lane.events[i];
        const x = place(start, width), wide = Math.max(0.4, lasts * scale(width));
        pen.fillStyle = data.colours[kind];
        pen.fillRect(x, y, wide > 3 ? wide - 0.6 : wide, height);
        if (tall && wide > 12) {
          const shown = pen.measureText(text).width < wide - 3 ? text : text.replace(/^\d+[A-Z]+/, "");
          if (pen.measureText(shown).width < wide - 3) {
            pen.fillStyle = kind === data.dark ? "#1b1f24" : "#fff";
            pen.fillText(shown, x + wide / 2, y + height / 2 + 1);
          }
        }
      }
      pen.restore();
    }
  };

  const hue = (row) => `hsl(${Math.round((row * 360) / Math.max(1, data.memory.length))} 60% 42%)`;
  const level = (points, t) => {
    let low = 0, high = points.length;
    while (low < high) { const m = (low + high) >> 1; if (points[m][0] <= t) low = m + 1; else high = m; }
    return points[Math.max(0, low - 1)][1];
  };
  const most = 1.05 * Math.max(data.capacity, ...data.memory.flat().map((point) => point[1]));
  const depth = (size) => MEMORY - 4 - (size / most) * (MEMORY - AXIS - 8);

  const drawMemory = () => {
    const { pen, width } = open("memory", MEMORY);
    axis(pen, width, MEMORY);
    pen.textAlign = "right";
    pen.fillStyle = "#5b6570";
    const step = [1, 2, 5, 10, 20, 50, 100].find((g) => most / GIB / g <= 6) || 200;
    for (let gib = 0; gib * GIB <= most; gib += step) pen.fillText(`${gib} GiB`, LEFT - 8, depth(gib * GIB));
    pen.strokeStyle = "#c0392b";
    pen.beginPath(); pen.moveTo(LEFT, depth(data.capacity)); pen.lineTo(width - 12, depth(data.capacity)); pen.stroke();
    pen.textAlign = "left"; pen.fillStyle = "#c0392b";
    pen.fillText("capacity", LEFT + 4, depth(data.capacity) - 7);
    pen.save();
    pen.beginPath(); pen.rect(LEFT, 0, width - LEFT - 12, MEMORY); pen.clip();
    data.memory.forEach((points, row) => {
      pen.strokeStyle = hue(row);
      pen.lineWidth = 1.3;
      pen.beginPath();
      pen.moveTo(LEFT - 1, depth(level(points, view.from)));
      for (const [t, size] of points) {
        const x = Math.max(LEFT - 1, place(t, width));
        if (t < view.from) { pen.lineTo(x, depth(size)); continue; }
        pen.lineTo(x, pen.last ?? depth(size)); pen.lineTo(x, depth(size));
        pen.last = depth(size);
        if (t > view.to) break;
      }
      pen.lineTo(width, depth(level(points, view.to)));
      pen.last = undefined;
      pen.stroke();
    });
    pen.restore();
  };

  const draw = () => { drawTimeline(); drawMemory(); };

  const show = (event, text) => {
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    const right = event.clientX + 16 + tip.offsetWidth > window.innerWidth;
    tip.style.left = `${right ? event.clientX - 12 - tip.offsetWidth : event.clientX + 14}px`;
    tip.style.top = `${event.clientY + 14}px`;
  };
  const overTimeline = (x, y, width) => {
    const lane = placed.lanes.find((each) => y >= each.y && y < each.y + each.height);
    if (!lane || x < LEFT) return "";
    const t = time(x, width), slack = 2 / scale(width), event = lane.events[first(lane.events, t - slack)];
    if (!event || event[0] > t + slack) return `row ${lane.row} ${lane.stream}: idle at ${seconds(t)}`;
    return `${event[2]}  ${data.kinds[event[3]]}\nrow ${lane.row}, ${lane.stream}\n` +
      `${seconds(event[0])} + ${seconds(event[1])}`;
  };
  const overMemory = (x, y, width) => {
    if (x < LEFT) return "";
    const t = time(x, width);
    const rows = data.memory.map((points, row) => `row ${row}  ${(level(points, t) / GIB).toFixed(2)} GiB`);
    return [seconds(t), ...rows.slice(0, 24), ...(rows.length > 24 ? ["..."] : [])].join("\n");
  };

  const clamp = (from, to) => {
    const length = Math.min(to - from, all.to - all.from);
    const start = Math.min(Math.max(from, all.from), all.to - length);
    view = { from: start, to: start + length };
    draw();
  };
  const zoom = (factor, at) => clamp(at - (at - view.from) * factor, at + (view.to - at) * factor);
  for (const [id, over] of [["timeline", overTimeline], ["memory", overMemory]]) {
    const canvas = document.getElementById(id);
    let drag = null;
    const here = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top, box.width]; };
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const [x, , width] = here(event);
      zoom(event.deltaY > 0 ? 1.25 : 0.8, time(Math.max(x, LEFT), width));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, ...view };
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("drag");
    });
    canvas.addEventListener("pointerup", () => { drag = null; canvas.classList.remove("drag"); });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y, width] = here(event);
      if (drag) {
        const by = (event.clientX - drag.x) / scale(width);
        clamp(drag.from - by, drag.to - by);
      } else show(event, over(x, y, width));
    });
    canvas.addEventListener("pointerleave", (event) => show(event, ""));
    canvas.addEventListener("dblclick", () => clamp(all.from, all.to));
  }
  const middle = () => (view.from + view.to) / 2;
  document.getElementById("in").addEventListener("click", () => zoom(0.5, middle()));
  document.getElementById("out").addEventListener("click", () => zoom(2, middle()));
  document.getElementById("whole").addEventListener("click", () => clamp(all.from, all.to));
  document.getElementById("streams").addEventListener("change", (event) => {
    streams = event.target.checked;
    placed = layout();
    draw();
  });
  window.addEventListener("resize", draw);
  draw();
})();
