// Page of one inspection. Weights are softmax(scale * q k) of the queries and keys in the file.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const count = data.tokens.length;
  const MOST = 160; // labels and cells of more tokens than these cannot be distinguished
  const LINKS = 10;
  const FALLS = new Set(["entropy", "effective_keys", "jacobian_trace"]); // towards collapse; the other statistics rise
  const drawn = data.layers.flatMap((one, layer) => Object.keys(one.query ?? one.weights).map((head) => ({ layer, head: +head })));
  const shown = { ...(drawn[0] ?? { layer: 0, head: 0 }), setting: "model", scale: "1", statistic: "entropy", rows: [0, count], cols: [0, count] };

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  const cache = new Map();
  const once = (name, make) => (cache.has(name) || cache.set(name, make()), cache.get(name));

  // One head's numbers as floats: fractions of 16 bits times their unit.
  const factors = (layer, kind, head) => once(`${kind} ${layer} ${head}`, () => {
    const { unit, numbers } = data.layers[layer][kind][head];
    return Float32Array.from(new Int16Array(bytes(numbers)), (x) => x * unit);
  });

  const maskOf = (layer) => {
    const visible = data.layers[layer].visible;
    if (visible === null) return () => true;
    if (Array.isArray(visible)) return (i, j) => j >= visible[0][i] && j < visible[1][i];
    const bits = once(`bits ${layer}`, () => new Uint8Array(bytes(visible)));
    return (i, j) => (bits[(i * count + j) >> 3] >> (7 - ((i * count + j) & 7))) & 1;
  };

  const isDrawn = (layer, head) => head in (data.layers[layer].query ?? data.layers[layer].weights);

  // The weights of one query on all keys.
  const rowOf = (layer, head, setting, i) => {
    const one = data.layers[layer];
    if (one.weights) {
      const codes = once(`codes ${layer} ${head}`, () => new Uint16Array(bytes(one.weights[head])));
      return Float64Array.from(codes.subarray(i * count, (i + 1) * count), (c) => c === 65535 ? 0 : Math.exp(-c / 65535 * 16));
    }
    const query = factors(layer, "query", head), key = factors(layer, "key", Math.floor(head / one.group));
    const dim = query.length / count, temperature = data.settings[setting].temperature;
    const scale = temperature === null ? 1 : one.scale / temperature, isUnmasked = maskOf(layer);
    const row = new Float64Array(count);
    let top = one.sink ? one.sink[head] : -Infinity;
    for (let j = 0; j < count; j++) {
      let sum = 0;
      for (let d = 0; d < dim; d++) sum += query[i * dim + d] * key[j * dim + d];
      sum *= scale;
      if (one.cap !== null) sum = one.cap * Math.tanh(sum / one.cap);
      row[j] = isUnmasked(i, j) ? sum : -Infinity;
      top = Math.max(top, row[j]);
    }
    let total = one.sink ? Math.exp(one.sink[head] - top) : 0;
    for (let j = 0; j < count; j++) total += row[j] = row[j] === -Infinity ? 0 : Math.exp(row[j] - top);
    return row.map((x) => total === 0 ? 0 : x / total);
  };

  // Bins of equal size, so that no cell is darker for being wider; the last may be smaller.
  const wideOf = ([from, to]) => Math.ceil((to - from) / MOST) || 1;
  const edgesOf = ([from, to]) => {
    const wide = wideOf([from, to]);
    return Array.from({ length: Math.ceil((to - from) / wide) + 1 }, (_, i) => Math.min(to, from + i * wide));
  };

  // The map of [from, to) x [from, to): a cell is a pair, or the mean weight of the pairs of a bin.
  const mapOf = (layer, head, setting, rows, cols) => {
    const down = edgesOf(rows), across = edgesOf(cols);
    const z = [];
    for (let r = 0; r + 1 < down.length; r++) {
      const line = new Array(across.length - 1).fill(0);
      for (let i = down[r]; i < down[r + 1]; i++) {
        const row = rowOf(layer, head, setting, i);
        for (let c = 0; c + 1 < across.length; c++) {
          const pairs = (down[r + 1] - down[r]) * (across[c + 1] - across[c]);
          for (let j = across[c]; j < across[c + 1]; j++) line[c] += row[j] / pairs;
        }
      }
      z.push(line);
    }
    return { z, down, across };
  };

  // Plotly reads tags: the token <s> would not be shown.
  const written = (i) => data.tokens[i].replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  const brief = (i) => { const token = [...data.tokens[i]]; return token.length > 18 ? `${token.slice(0, 17).join("").replaceAll("&", "&amp;").replaceAll("<", "&lt;")}…` : written(i); };
  const span = (edges, i) => edges[i + 1] - edges[i] === 1
    ? `${written(edges[i])} (${edges[i]})`
    : `${written(edges[i])} … ${written(edges[i + 1] - 1)} (${edges[i]} to ${edges[i + 1] - 1})`;

  const colours = () => {
    const style = getComputedStyle(document.documentElement), value = (name) => style.getPropertyValue(name).trim();
    return { ground: value("--ground"), panel: value("--panel"), ink: value("--ink"), line: value("--line"), strong: value("--strong"), onStrong: value("--on-strong") };
  };
  const brush = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (colour) => {
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...brush.getImageData(0, 0, 1, 1).data].map((x) => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const axis = (edges, title, most) => {
    const n = edges.length - 1, step = Math.max(1, Math.ceil(n / most));
    const places = Array.from({ length: Math.ceil(n / step) }, (_, i) => i * step);
    return { title: { text: title, standoff: 12 }, automargin: true, tickmode: "array", tickvals: places, ticktext: places.map((i) => brief(edges[i])),
      tickfont: { size: 10 }, constrain: "domain", showgrid: false, zeroline: false };
  };
  const plain = { displaylogo: false, responsive: true, displayModeBar: true, showSendToCloud: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  const frame = (more) => {
    const c = colours();
    return { paper_bgcolor: c.ground, plot_bgcolor: c.panel, font: { color: c.ink, family: "system-ui, sans-serif" }, margin: { l: 90, r: 20, t: 36, b: 90 }, ...more };
  };

  const drawMap = () => {
    const { layer, head, setting, scale, rows, cols } = shown, c = colours();
    const found = mapOf(layer, head, setting, rows, cols);
    const exact = rows[1] - rows[0] <= MOST && cols[1] - cols[0] <= MOST;
    const text = found.z.map((line, r) => line.map((w, k) =>
      `query ${span(found.down, r)}<br>key ${span(found.across, k)}<br>${exact ? "weight" : "mean weight"} ${w.toFixed(4)}`));
    // A bin that gets all of its queries' weight has the colour of a weight of 1.
    const zmax = scale ? 1 / wideOf(cols) : Math.max(...found.z.flat());
    const trace = { type: "heatmap", z: found.z, text, hoverinfo: "text", zmin: 0, zmax, xgap: 0.5, ygap: 0.5,
      colorscale: [[0, c.panel], [1, c.strong]], colorbar: { title: { text: `${exact ? "weight" : "mean weight"} of key j for query i`, side: "right" }, thickness: 12 } };
    const layout = frame({ height: 640, xaxis: { ...axis(found.across, "keys", 60), tickangle: -90 },
      yaxis: { ...axis(found.down, "queries", 45), autorange: "reversed" } });
    // The element has no `on` before its first map.
    return Plotly.react(at("map"), [trace], layout, plain).then(() => once("zoom", () => at("map").on("plotly_relayout", zoom)));
  };

  // What each token receives, and the largest weights: all rows once. The edges under the model's own scale are in the file, computed by the library.
  const sumsOf = (layer, head, setting) => once(`sums ${layer} ${head} ${setting}`, () => {
    const mass = new Array(count).fill(0);
    let links = [];
    for (let i = 0; i < count; i++) {
      const row = rowOf(layer, head, setting, i);
      row.forEach((w, j) => {
        mass[j] += w;
        if (links.length < LINKS || w > links.at(-1)[2]) links = [...links, [i, j, w]].sort((a, b) => b[2] - a[2]).slice(0, LINKS);
      });
    }
    return { mass, links };
  });
  const linksOf = ({ layer, head, setting }) => (setting === "model" || !isDrawn(layer, head)
    ? data.links[layer][head] : sumsOf(layer, head, setting).links).filter(([, , w]) => w > 0);
  const drawMass = () => {
    const c = colours(), [from, to] = shown.cols, mass = sumsOf(shown.layer, shown.head, shown.setting).mass.slice(from, to);
    const edges = Array.from({ length: to - from + 1 }, (_, i) => from + i);
    const trace = { type: "bar", y: mass, marker: { color: c.strong }, hoverinfo: "text",
      hovertext: mass.map((w, i) => `${span(edges, i)}<br>weight received ${w.toFixed(3)}`) };
    return Plotly.react(at("mass"), [trace], frame({ height: 280, xaxis: { ...axis(edges, "key", 60), tickangle: -90 }, yaxis: { gridcolor: c.line, title: { text: "sum of weights" } } }), plain);
  };

  const cell = (kind, text) => { const made = document.createElement(kind); made.textContent = text; return made; };
  const heading = (text, scope) => { const made = cell("th", text); made.scope = scope; return made; };
  const line = (cells) => { const made = document.createElement("tr"); made.append(...cells); return made; };
  const fill = (table, head, rows) => {
    const first = head ? (text) => cell("td", text) : (text) => heading(text, "row");
    table.replaceChildren(...(head ? [line(head.map((text) => heading(text, "col")))] : []),
      ...rows.map((texts) => line(texts.map((text, i) => i ? cell("td", text) : first(text)))));
  };
  const short = (x) => {
    if (x === null) return "NaN";
    const size = Math.abs(x);
    return size >= 1e5 || (size !== 0 && size < 0.001) ? x.toExponential(1) : size >= 1000 ? x.toFixed(0) : x.toPrecision(3);
  };

  const drawTables = () => {
    const { layer, head } = shown;
    fill(at("links"), ["query", "key", "weight"], linksOf(shown).map(([i, j, w]) =>
      [`${data.tokens[i]} (${i})`, `${data.tokens[j]} (${j})`, w.toFixed(4)]));
    fill(at("settings"), ["scores", "entropy", "largest weight"], Object.values(data.settings).map((one) =>
      [one.title, short(one.entropy[layer][head]), short(one.largest_weight[layer][head])]));
    fill(at("numbers"), null, Object.values(data.statistics).map((one) => [one.title, short(one.values[layer][head])]));
  };

  const say = () => {
    const { layer, head, setting } = shown, links = linksOf(shown), [link] = links, wide = [wideOf(shown.rows), wideOf(shown.cols)];
    at("head-title").textContent = `Layer ${layer}, head ${head}`;
    // Equal weights, as of a head that averages: the first of them is no stronger than the others.
    const ties = links.filter(([, , w]) => w >= link[2] * (1 - 1e-4)).length;
    const strongest = ties > 1 ? ` Its largest weight, ${link[2].toFixed(3)}, is that of ${ties} edges${ties === LINKS ? " or more" : ""}.` : link ? ` Its strongest attention edge: “${data.tokens[link[0]]}” to “${data.tokens[link[1]]}”, weight ${link[2].toFixed(3)}.` : "";
    const binned = Math.max(...wide) > 1 ? ` A cell is ${wide[0]} × ${wide[1]} tokens: draw a box, or fill in the fields, to show each token.` : "";
    const where = isDrawn(layer, head) ? binned : " Its map is not in this file, which holds as many heads as its size allows.";
    at("said").textContent = `${data.layers[layer].name}. Scores ${data.settings[setting].title}. Mean entropy ` +
      `${short(data.settings[setting].entropy[layer][head])} nats.${strongest}${where}`;
  };

  const drawGrid = () => {
    const { title, meaning, values } = data.statistics[shown.statistic];
    at("meaning").textContent = meaning;
    const all = values.flat().filter((x) => x !== null), low = Math.min(...all), high = Math.max(...all);
    // Where a few large numbers would leave half the heads in the palest tenth, equal steps of colour are equal factors.
    const middle = [...all].sort((a, b) => a - b)[all.length >> 1];
    const isWide = low > 0 && middle - low < 0.1 * (high - low), on = isWide ? Math.log : (x) => x;
    at("meaning").textContent += `. Stronger colours: closer to the value of one key for each query${isWide ? ", on a logarithmic scale" : ""}.`;
    const strength = (x) => { const up = (on(x) - on(low)) / (on(high) - on(low)); return FALLS.has(shown.statistic) ? 1 - up : up; };
    const most = Math.max(...data.layers.map((one) => one.heads));
    const head = line([cell("td", ""), ...Array.from({ length: most }, (_, h) => heading(`${h}`, "col"))]);
    const lines = values.map((row, layer) => line([heading(`${layer}`, "row"), ...row.map((x, h) => {
        const box = document.createElement("td"), button = cell("button", short(x)), share = x !== null && high > low ? strength(x) : 0;
        button.type = "button";
        button.dataset.layer = layer; button.dataset.head = h;
        button.style.setProperty("--share", (share * 100).toFixed(1));
        button.setAttribute("aria-label", `layer ${layer}, head ${h}: ${title} ${short(x)}`);
        button.setAttribute("aria-pressed", layer === shown.layer && h === shown.head);
        box.append(button);
        return box;
      })]));
    at("grid").replaceChildren(head, ...lines);
    // Of the two inks the one with the better contrast to the cell's colour, in light and dark.
    document.querySelectorAll("#grid button").forEach((button) => {
      const ground = luminance(getComputedStyle(button).backgroundColor);
      const contrast = (name) => { const ink = luminance(colours()[name]); return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05); };
      button.classList.toggle("deep", contrast("onStrong") > contrast("ink"));
    });
  };

  const options = (select, pairs) => select.replaceChildren(...pairs.map(([value, text]) => { const made = cell("option", text); made.value = value; return made; }));
  const drawHead = () => {
    options(at("head"), Array.from({ length: data.layers[shown.layer].heads }, (_, h) => [h, h]));
    at("layer").value = shown.layer; at("head").value = shown.head; at("setting").value = shown.setting; at("scale").value = shown.scale;
    // A map that is stored as weights has only the model's scale.
    at("setting").disabled = Boolean(data.layers[shown.layer].weights);
    if (at("setting").disabled) shown.setting = at("setting").value = "model";
    [["query-from", shown.rows[0]], ["query-to", shown.rows[1] - 1], ["key-from", shown.cols[0]], ["key-to", shown.cols[1] - 1]].forEach(([id, x]) => { at(id).value = x; });
    document.querySelectorAll("#grid button").forEach((button) =>
      button.setAttribute("aria-pressed", +button.dataset.layer === shown.layer && +button.dataset.head === shown.head));
    drawTables();
    say();
    const hasMap = isDrawn(shown.layer, shown.head);
    at("map").hidden = at("mass").hidden = !hasMap;
    return hasMap ? Promise.all([drawMap(), drawMass()]) : Promise.resolve();
  };
  const choose = (change) => { Object.assign(shown, change); shown.head = Math.min(shown.head, data.layers[shown.layer].heads - 1); return drawHead(); };

  const between = (id, low, high) => Math.min(high, Math.max(low, Math.round(Number(at(id).value)) || 0));
  const block = (side) => { const from = between(`${side}-from`, 0, count - 1); return [from, between(`${side}-to`, from, count - 1) + 1]; };

  options(at("statistic"), Object.entries(data.statistics).map(([name, one]) => [name, one.title]));
  options(at("layer"), data.layers.map((one, i) => [i, `${i}  ${one.name}`]));
  options(at("setting"), Object.entries(data.settings).map(([name, one]) => [name, one.title]));
  at("most").textContent = MOST;
  document.querySelectorAll("#block input").forEach((field) => { field.max = count - 1; });
  at("statistic").addEventListener("change", (event) => { shown.statistic = event.target.value; drawGrid(); });
  for (const name of ["layer", "head"]) at(name).addEventListener("change", (event) => choose({ [name]: +event.target.value }));
  for (const name of ["setting", "scale"]) at(name).addEventListener("change", (event) => choose({ [name]: event.target.value }));
  at("show").addEventListener("click", () => choose({ rows: block("query"), cols: block("key") }));
  at("whole").addEventListener("click", () => choose({ rows: [0, count], cols: [0, count] }));
  at("grid").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) choose({ layer: +button.dataset.layer, head: +button.dataset.head });
  });
  at("grid").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const { layer, head } = event.target.dataset;
    if (!move || layer === undefined) return;
    const next = at("grid").querySelector(`[data-layer="${+layer + move[0]}"][data-head="${+head + move[1]}"]`);
    if (next) { next.focus(); event.preventDefault(); }
  });

  // A box drawn on a binned map zooms to its tokens, which are exact where they are few enough.
  const zoom = (moved) => {
    const isBinned = shown.rows[1] - shown.rows[0] > MOST || shown.cols[1] - shown.cols[0] > MOST;
    if (!isBinned || !Object.keys(moved).some((name) => name.includes(".range["))) return;
    const side = (axis, [from, to]) => {
      const ends = [moved[`${axis}.range[0]`], moved[`${axis}.range[1]`]];
      if (ends.includes(undefined)) return [from, to];
      const edges = edgesOf([from, to]), edge = (i) => edges[Math.min(edges.length - 1, Math.max(0, i))];
      const [low, high] = [Math.min(...ends) + 0.5, Math.max(...ends) + 0.5];
      return [edge(Math.floor(low)), Math.max(edge(Math.floor(low)) + 1, edge(Math.ceil(high)))];
    };
    choose({ rows: side("yaxis", shown.rows), cols: side("xaxis", shown.cols) });
  };
  // Paper is light, whatever the screen is.
  const paper = (on) => { document.documentElement.classList.toggle("paper", on); drawGrid(); drawHead(); };
  addEventListener("beforeprint", () => paper(true));
  addEventListener("afterprint", () => paper(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawGrid(); drawHead(); });

  drawGrid();
  drawHead().then(() => { document.body.dataset.ready = "yes"; });
})();
