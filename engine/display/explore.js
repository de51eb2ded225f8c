// The view that gg.explore makes: a memory plan, and beside it the run, step by step.  No library, no network.
//
//   data.axes      [{name, values}]              what can be dragged; data.plans lie in their order, the last fastest
//   data.graphs    [{first, name, op, kind, nbytes, where, src}]     columns, an entry a tensor: leaves, then the nodes
//                                                from number `first` on: node k is computed at step k
//   data.plans     [{graph, peak, bound, planner, kinds, lo, hi, size, bottom, alloc}]     lo .. bottom: columns, an
//                                                entry a box; alloc: the box of every tensor, or -1
//   data.run       [{seconds, at, values, about}] of every step, of the first plan; or null
//   data.strings   what the columns name, kind, where and op hold numbers of
function ggjitExplore(root, data) {
  "use strict";
  const S = data.strings, WIDTH = 860, HEIGHT = 320, LEFT = 64, TOP = 8, FOOT = 44;
  const state = {at: data.axes.map(() => 0), step: null, colour: "op", view: null};
  const $ = name => root.querySelector(`[data-part="${name}"]`);
  const escaped = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
  const commas = n => n.toLocaleString("en-US");
  const unitOf = n => [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "bytes"]].find(u => n >= u[0] || u[0] === 1);
  const size = n => { const [u, name] = unitOf(n); return u === 1 ? `${n} bytes` : `${(n / u).toFixed(2)} ${name}`; };
  const seconds = s => s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} us`;
  const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
  const wide = text => [...text].reduce((n, c) => n + (c.codePointAt(0) < 0x1100 ? 6 : 11), 0);      // pixels, about

  const paler = colour => "#" + [1, 3, 5].map(i => Math.round(0.45 * parseInt(colour.slice(i, i + 2), 16) + 0.55 * 232).toString(16).padStart(2, "0")).join("");

  // ---------------------------------------------------------------- what is looked at
  const number = () => state.at.reduce((n, i, k) => n * data.axes[k].values.length + i, 0);
  const plan = () => prepared(data.plans[number()]);
  const graphOf = p => data.graphs[p.graph];
  const name = (p, t) => S[graphOf(p).name[t]];

  function prepared(p) {              // n_steps, bytes alive at every step, the tensors of every box, who reads whom
    if (p.live) return p;
    const g = graphOf(p);
    p.nSteps = g.name.length - g.first;
    p.live = new Float64Array(p.nSteps + 1);
    p.size.forEach((n, b) => { p.live[p.lo[b]] += n; p.live[Math.min(p.hi[b], p.nSteps)] -= n; });
    for (let k = 1; k <= p.nSteps; k++) p.live[k] += p.live[k - 1];
    p.peakStep = 0;
    for (let k = 1; k < p.nSteps; k++) if (p.live[k] > p.live[p.peakStep]) p.peakStep = k;
    p.holders = p.size.map(() => []);
    p.alloc.forEach((b, t) => { if (b >= 0) p.holders[b].push(t); });
    if (!g.readers) {
      g.readers = g.name.map(() => []);
      g.src.forEach((sources, t) => new Set(sources).forEach(s => g.readers[s].push(t)));
    }
    return p;
  }

  function holder(p, b, step) {       // of several tensors in one box the one computed last
    const first = graphOf(p).first, born = t => Math.max(0, t - first);
    const started = p.holders[b].filter(t => born(t) <= step), all = started.length ? started : p.holders[b];
    return all.reduce((a, t) => a === null || born(t) >= born(a) ? t : a, null);
  }

  function keys(p) {                  // the colour of every box, and the legend
    const kept = p.colours = p.colours || {};
    if (kept[state.colour]) return kept[state.colour];
    const g = graphOf(p);
    if (state.colour === "lifetime") {
      const of = p.size.map((_, b) => data.lifetimes.find(x => x[0] === null || p.hi[b] - p.lo[b] <= x[0]));
      const legend = data.lifetimes.filter(x => of.includes(x)).map(x => [x[1], x[2]]);
      return kept.lifetime = {of: of.map(x => x[2]), legend};
    }
    const total = new Map(), ops = p.size.map((_, b) => p.holders[b].length ? S[g.op[p.holders[b][0]]] : "?");
    ops.forEach((op, b) => total.set(op, (total.get(op) || 0) + p.size[b] * (p.hi[b] - p.lo[b])));
    const ranked = [...total.keys()].sort((a, b) => total.get(b) - total.get(a));
    const legend = ranked.slice(0, data.palette.length).map((op, i) => [op, data.palette[i]]);
    const colour = new Map(legend);
    if (ranked.length > legend.length) legend.push(["others", data.other]);
    return kept.op = {of: ops.map(op => colour.get(op) || data.other), legend};
  }

  // ---------------------------------------------------------------- the picture
  function ticks(low, high, n, whole) {
    const rough = Math.max(high - low, 1e-9) / n, power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map(k => k * power).find(s => s >= rough * 0.999);
    if (whole) step = Math.max(1, step);
    const out = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) out.push(+(k * step).toPrecision(12));
    return out;
  }

  function ink(colour) {
    const [r, g, b] = [1, 3, 5].map(i => (parseInt(colour.slice(i, i + 2), 16) / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000000" : "#ffffff";
  }

  function draw() {
    const p = plan(), k = keys(p), whole = {x0: 0, x1: p.nSteps, y0: 0, y1: Math.max(p.peak, 1) * 1.03};
    const v = state.view || whole, [unit, unitName] = unitOf(p.peak);
    const sx = WIDTH / (v.x1 - v.x0), sy = HEIGHT / (v.y1 - v.y0);
    const X = x => (x - v.x0) * sx, Y = y => HEIGHT - (y - v.y0) * sy;
    const boxes = [], labels = [], axes = [], seen = new Set();
    p.size.forEach((n, b) => {
      const x = X(p.lo[b]), w = Math.max((p.hi[b] - p.lo[b]) * sx, 0.5), h = Math.max(n * sy, 0.4), y = Y(p.bottom[b]) - h;
      if (!n || x > WIDTH || x + w < 0 || y > HEIGHT || y + h < 0) return;
      const now = p.lo[b] <= state.step && state.step < p.hi[b], c = now ? k.of[b] : paler(k.of[b]);
      if (w < 1 && !now) {            // of those in one column of pixels that look alike, the first
        const key = `${Math.floor(x)},${Math.round(y)},${Math.round(y + h)},${c}`;
        if (seen.has(key)) return;
        seen.add(key);
      }
      boxes.push(`<rect data-box="${b}" x="${x.toFixed(1)}" y="${y.toFixed(1)}" width="${w.toFixed(1)}" height="${h.toFixed(1)}" ` +
                 `fill="${c}" stroke="${now ? data.live : data.rim}" stroke-width="${now ? 1.2 : w < 2 ? 0 : 0.4}"/>`);
      const text = p.holders[b].length ? name(p, now ? holder(p, b, state.step) : p.holders[b][0]) : "";
      const left = Math.max(x, 0), right = Math.min(x + w, WIDTH), top = Math.max(y, 0), foot = Math.min(y + h, HEIGHT);
      const length = wide(text) + 4, flat = right - left > length && foot - top > 12;
      if (text && labels.length < 400 && (flat || (foot - top > length && right - left > 12)))
        labels.push(`<text transform="translate(${((left + right) / 2).toFixed(1)} ${((top + foot) / 2).toFixed(1)})${flat ? "" : " rotate(-90)"}" ` +
                    `y="3.5" text-anchor="middle" fill="${ink(c)}" stroke="${c}" stroke-width="4" paint-order="stroke">${escaped(text)}</text>`);
    });
    const line = [];
    for (let s = Math.max(0, Math.floor(v.x0)); s < Math.min(p.nSteps, Math.ceil(v.x1)); s++)
      line.push(`${X(s).toFixed(1)},${Y(p.live[s]).toFixed(1)} ${X(s + 1).toFixed(1)},${Y(p.live[s]).toFixed(1)}`);
    const thin = v.x1 - v.x0 > 400, crowded = sx < 3;           // then lines on rims would hide the boxes
    const both = (shape, colour, extra) => `<${shape} stroke="${data.rim}" stroke-width="${thin ? 1.8 : 3}"/><${shape} stroke="${colour}" stroke-width="${thin ? 0.7 : 1.3}" ${extra}/>`;
    for (const y of ticks(v.y0 / unit, v.y1 / unit, 6, false))
      axes.push(`<path d="M${LEFT - 4} ${TOP + Y(y * unit)}H${LEFT + WIDTH}" stroke="currentColor" stroke-opacity=".25"/>` +
                `<text x="${LEFT - 8}" y="${TOP + Y(y * unit) + 3.5}" text-anchor="end">${y}</text>`);
    for (const x of ticks(v.x0, v.x1, 12, true))
      axes.push(`<path d="M${LEFT + X(x)} ${TOP + HEIGHT}v4" stroke="currentColor"/>` +
                `<text x="${LEFT + X(x)}" y="${TOP + HEIGHT + 16}" text-anchor="middle">${x}</text>`);
    $("picture").innerHTML =
      `<svg viewBox="0 0 ${LEFT + WIDTH + 12} ${TOP + HEIGHT + FOOT}" style="width:100%;max-width:${LEFT + WIDTH + 12}px;display:block;` +
      `user-select:none;cursor:crosshair" font-size="10.5" font-family="sans-serif" fill="currentColor">${axes.join("")}` +
      `<path d="M${LEFT} ${TOP}v${HEIGHT}h${WIDTH}" fill="none" stroke="currentColor"/>` +
      `<text x="${LEFT + WIDTH / 2}" y="${TOP + HEIGHT + 34}" text-anchor="middle">step (node in the order of computing)</text>` +
      `<text x="13" y="${TOP + HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 13 ${TOP + HEIGHT / 2})">offset, ${unitName}</text>` +
      `<svg x="${LEFT}" y="${TOP}" width="${WIDTH}" height="${HEIGHT}"><rect width="${WIDTH}" height="${HEIGHT}" fill-opacity="0"/>` +
      `${boxes.join("")}<g fill="none" pointer-events="none">${both(`path d="M0 ${Y(p.bound)}H${WIDTH}"`, data.bound, 'stroke-dasharray="5 4"')}` +
      `${crowded ? `<polyline points="${line.join(" ")}" stroke="currentColor" stroke-width=".5" stroke-opacity=".5"/>` : both(`polyline points="${line.join(" ")}"`, data.live, "")}${both(`path d="M${X(state.step + 0.5)} 0V${HEIGHT}"`, data.live, 'stroke-dasharray="2 3"')}</g>` +
      `<g pointer-events="none">${labels.join("")}<rect data-part="frame" fill="none" stroke="${data.bound}" stroke-width="2" visibility="hidden"/></g></svg></svg>`;
    $("legend").innerHTML = [...k.legend.map(([text, c]) => [text, `background:${c};height:11px;width:11px`]),
      ["live bytes", `background:${data.live};height:2px;width:16px;outline:1px solid ${data.rim}`],
      ["lower bound", `border-top:2px dashed ${data.bound};width:16px;background:${data.rim}`]]
      .map(([text, style]) => `<span class="gx-key"><i style="${style}"></i>${escaped(text)}</span>`).join("");
    $("numbers").textContent = `peak ${size(p.peak)} at step ${p.peakStep}, lower bound ${size(p.bound)}` +
      (p.bound && p.peak > p.bound ? ` (${((p.peak / p.bound - 1) * 100).toFixed(1)} % above it)` : "") + `, planner ${p.planner}` +
      Object.entries(p.kinds || {}).map(([kind, n]) => `; ${kind} ${size(n)}`).join("");
  }

  // ---------------------------------------------------------------- the step
  const link = (p, t) => {
    const g = graphOf(p);
    return t >= g.first ? `<a data-step="${t - g.first}" tabindex="0" role="button">${escaped(name(p, t))}</a>` : escaped(name(p, t));
  };
  const table = (head, rows) => `<table><tr>${head.map(h => `<th>${h}</th>`).join("")}</tr>` +
    rows.map(r => `<tr>${r.map(c => `<td>${c}</td>`).join("")}</tr>`).join("") + "</table>";

  function showStep() {
    const p = plan(), g = graphOf(p), t = g.first + state.step, b = p.alloc[t], run = number() === 0 && data.run && data.run[state.step];
    $("step").max = p.nSteps - 1;
    $("step").value = state.step;
    $("where").textContent = `step ${state.step} of ${p.nSteps}, ${size(p.live[state.step])} live`;
    const facts = [["tensor", `<b>${escaped(name(p, t))}</b> ${escaped(S[g.kind[t]])}, ${commas(g.nbytes[t])} bytes`],
                   ["op", `${escaped(S[g.op[t]])}(${g.src[t].map(s => link(p, s)).join(", ")})`],
                   ["read by", g.readers[t].map(s => link(p, s)).join(", ") || "nobody: an output"],
                   ["made at", escaped(S[g.where[t]])],
                   ["in the plan", b < 0 ? "no memory of its own" : `offset ${commas(p.bottom[b])}, steps ${p.lo[b]} to ${p.hi[b] - 1}` +
                     (p.holders[b][0] !== t ? `, in the memory of ${link(p, p.holders[b][0])}` : "")]];
    if (run) facts.push(["lay at", escaped(run.at)], ["time", run.seconds === null ? "none: no bytes move" : seconds(run.seconds)],
                        ["values", escaped(run.about)]);
    $("node").innerHTML = `<table>${facts.filter(f => f[1]).map(([a, x]) => `<tr><th>${a}</th><td>${x}</td></tr>`).join("")}</table>` +
      (run && run.values.length ? `<table class="gx-values">${run.values.map(r => `<tr>${r.map(x => `<td>${escaped(x)}</td>`).join("")}</tr>`).join("")}</table>` : "");
    $("near").innerHTML = near(p, t);
    const alive = p.size.map((n, i) => i).filter(i => p.size[i] && p.lo[i] <= state.step && state.step < p.hi[i]).sort((x, y) => p.size[y] - p.size[x]);
    $("alive").innerHTML = `<b>${alive.length} live at this step</b>` + table(["tensor", "bytes", "offset", "steps"],
      alive.slice(0, 12).map(i => [link(p, holder(p, i, state.step)), commas(p.size[i]), commas(p.bottom[i]), `${p.lo[i]} to ${p.hi[i] - 1}`])) +
      (alive.length > 12 ? `... ${alive.length - 12} more` : "");
  }

  function near(p, t) {               // the graph around a node: sources above, readers below
    const g = graphOf(p), rows = [[...new Set(g.src[t])].slice(0, 4), [t], g.readers[t].slice(0, 4)], w = 108, gap = 10, out = [];
    const span = Math.max(...rows.map(r => r.length)) * (w + gap), at = (row, i) => span / 2 + (i - (row.length - 1) / 2) * (w + gap);
    const cut = text => {
      const letters = [...text];
      while (wide(letters.join("")) > w - 6) letters.splice(-2, 2, "\u2026");
      return letters.join("");
    };
    rows.forEach((row, r) => row.forEach((x, i) => {
      if (r < 2) rows[r + 1].forEach((_, j) => { if (r === 1 || j === 0)
        out.push(`<path d="M${at(row, i)} ${r * 54 + 34}L${at(rows[r + 1], j)} ${r * 54 + 56}" stroke="currentColor" stroke-opacity=".6"/>`); });
      const node = x >= g.first;
      out.push(`<g ${node ? `data-step="${x - g.first}" style="cursor:pointer"` : ""}><title>${escaped(name(p, x))}</title>` +
        `<rect x="${at(row, i) - w / 2}" y="${r * 54 + 2}" width="${w}" height="32" rx="4" fill="currentColor" fill-opacity="${r === 1 ? 0.16 : 0.06}" stroke="currentColor" ` +
        `stroke-width="${r === 1 ? 1.6 : 0.8}" ${node ? "" : 'stroke-dasharray="4 3"'}/><text x="${at(row, i)}" y="${r * 54 + 15}" text-anchor="middle">${escaped(cut(name(p, x)))}</text>` +
        `<text x="${at(row, i)}" y="${r * 54 + 28}" text-anchor="middle" fill-opacity=".75">${escaped(cut(S[g.op[x]]))}</text></g>`);
    }));
    return `<svg class="gx-near" width="${span}" height="${rows[2].length ? 146 : 92}" font-size="10.5" font-family="sans-serif" fill="currentColor">${out.join("")}</svg>`;
  }

  // ---------------------------------------------------------------- what the reader does
  function go(step) { state.step = clamp(step, 0, plan().nSteps - 1); draw(); showStep(); }

  let due = 0;
  function dragged(step) {            // the picture is drawn at once, then once a frame, however fast the slider moves
    state.step = step;
    if (due) return;
    go(step);
    due = requestAnimationFrame(() => { due = 0; if (state.step !== step) go(state.step); });
  }

  function choose(axis, i) {
    const before = plan().nSteps;
    state.at[axis] = i;
    const p = plan();
    state.view = null;
    go(p.nSteps === before ? state.step : p.peakStep);
  }

  function controls() {
    $("axes").innerHTML = data.axes.map((a, k) => {
      const numeric = a.values.every(x => typeof x === "number");
      const value = escaped(a.values[state.at[k]]);
      return `<label>${escaped(a.name)} ` + (numeric
        ? `<input type="range" data-axis="${k}" min="0" max="${a.values.length - 1}" value="${state.at[k]}"> <b>${value}</b>`
        : a.values.map((x, i) => `<button data-axis="${k}" data-i="${i}" aria-pressed="${i === state.at[k]}">${escaped(x)}</button>`).join("")) + "</label>";
    }).join("") + `<label>colour ${["op", "lifetime"].map(c => `<button data-colour="${c}" aria-pressed="${c === state.colour}">${c}</button>`).join("")}</label>`;
  }

  function zoomed(factor, cx = 0.5, cy = 0.5) {       // factor below 1: closer; cx, cy: shares that stay where they are
    const p = plan(), most = {x: p.nSteps, y: Math.max(p.peak, 1) * 1.03};
    const v = state.view || {x0: 0, x1: most.x, y0: 0, y1: most.y}, out = {};
    for (const [axis, c] of [["x", cx], ["y", cy]]) {
      const low = v[axis + 0], high = v[axis + 1], at = low + c * (high - low);
      const span = clamp((high - low) * factor, axis === "x" ? Math.min(2, most.x) : most.y * 1e-4, most[axis]);
      out[axis + 0] = clamp(at - c * span, 0, most[axis] - span);
      out[axis + 1] = out[axis + 0] + span;
    }
    state.view = factor > 1 && out.x1 - out.x0 >= most.x && out.y1 - out.y0 >= most.y ? null : out;
    draw();
  }

  function place(event) {             // the pointer as shares of the plane: from the left, from the foot
    const svg = picture.firstChild.getBoundingClientRect();
    const scale = svg.width / (LEFT + WIDTH + 12), x = (event.clientX - svg.left) / scale - LEFT, y = (event.clientY - svg.top) / scale - TOP;
    return [clamp(x / WIDTH, 0, 1), clamp(1 - y / HEIGHT, 0, 1)];
  }

  function hover(event) {
    const box = event.target.dataset && event.target.dataset.box, tip = $("tip");
    tip.style.display = box === undefined ? "none" : "block";
    if (box === undefined) return;
    const p = plan(), g = graphOf(p), r = root.getBoundingClientRect();
    const lines = p.holders[box].slice(0, 6).map(t => `${name(p, t)}: ${S[g.op[t]]} ${S[g.kind[t]]}, ${commas(g.nbytes[t])} bytes` +
      (S[g.where[t]] ? `, ${S[g.where[t]]}` : ""));
    tip.textContent = [...lines, `steps ${p.lo[box]} to ${p.hi[box] - 1}, offset ${commas(p.bottom[box])} to ${commas(p.bottom[box] + p.size[box])}`].join("\n");
    tip.style.left = `${clamp(event.clientX - r.left + 12, 0, Math.max(0, r.width - 330))}px`;
    tip.style.top = `${event.clientY - r.top + 14}px`;
  }

  let start = null;
  const picture = $("picture");
  picture.addEventListener("mousedown", e => { if (e.button === 0) { start = place(e); e.preventDefault(); } });
  picture.addEventListener("mousemove", e => {
    hover(e);
    if (start && !(e.buttons & 1)) { start = null; draw(); }          // let go outside the picture
    if (!start) return;
    const [x, y] = place(e), f = $("frame"), at = {x: Math.min(x, start[0]) * WIDTH, y: (1 - Math.max(y, start[1])) * HEIGHT,
      width: Math.abs(x - start[0]) * WIDTH, height: Math.abs(y - start[1]) * HEIGHT, visibility: "visible"};
    Object.entries(at).forEach(([k, value]) => f.setAttribute(k, value));
  });
  picture.addEventListener("mouseleave", () => { $("tip").style.display = "none"; });
  picture.addEventListener("mouseup", e => {
    if (!start) return;
    const [x, y] = place(e), [u, w] = start, p = plan();
    const v = state.view || {x0: 0, x1: p.nSteps, y0: 0, y1: Math.max(p.peak, 1) * 1.03}, dx = v.x1 - v.x0, dy = v.y1 - v.y0;
    start = null;
    if (Math.abs(x - u) * WIDTH > 6 && Math.abs(y - w) * HEIGHT > 6) {
      state.view = {x0: v.x0 + Math.min(x, u) * dx, x1: v.x0 + Math.max(x, u) * dx, y0: v.y0 + Math.min(y, w) * dy, y1: v.y0 + Math.max(y, w) * dy};
      draw();
    } else go(Math.floor(v.x0 + x * dx));
  });
  picture.addEventListener("dblclick", () => { state.view = null; draw(); });
  picture.addEventListener("wheel", e => { if (e.ctrlKey || e.metaKey) { e.preventDefault(); zoomed(e.deltaY < 0 ? 0.8 : 1.25, ...place(e)); } }, {passive: false});
  root.addEventListener("input", e => {
    if (e.target.dataset.part === "step") dragged(+e.target.value);
    else if (e.target.dataset.axis !== undefined) {
      const axis = +e.target.dataset.axis, i = +e.target.value;      // the slider stays: it is being dragged
      e.target.nextElementSibling.textContent = data.axes[axis].values[i];
      choose(axis, i);
    }
  });
  root.addEventListener("keydown", e => { if ((e.key === "Enter" || e.key === " ") && e.target.dataset.step !== undefined) { e.preventDefault(); go(+e.target.dataset.step); } });
  root.addEventListener("click", e => {
    const d = (e.target.closest("[data-step],[data-axis],[data-colour],[data-do]") || e.target).dataset || {};
    if (d.step !== undefined) go(+d.step);
    else if (d.i !== undefined) { choose(+d.axis, +d.i); controls(); }
    else if (d.colour !== undefined) { state.colour = d.colour; controls(); draw(); }
    else if (d.do === "in") zoomed(0.5);
    else if (d.do === "out") zoomed(2);
    else if (d.do === "whole") { state.view = null; draw(); }
    else if (d.do === "peak") go(plan().peakStep);
    else if (d.do === "back") go(state.step - 1);
    else if (d.do === "on") go(state.step + 1);
  });
  state.step = plan().peakStep;
  controls();
  go(state.step);
}
