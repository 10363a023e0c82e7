// The page of one run or several: its charts and controls; if `dtrain report --serve` serves it, it follows the runs.
const EVERY = 2000;  // milliseconds between two looks at live runs
const root = document.documentElement, numbers = new Map(), charts = new Map();
const byId = name => document.getElementById(name);
const settings = {
  smoothing: 0, logarithmic: false, several: false,
  // The number of a run, or of a kind of line, which chooses its colour: the same in all charts.
  number(name) {
    if (!numbers.has(name)) numbers.set(name, numbers.size);
    return numbers.get(name);
  },
};

function theme() {
  const select = byId('theme');
  try { select.value = localStorage.getItem('dtrain-theme') || 'system'; } catch { /* files may have no storage */ }
  const set = () => { root.dataset.theme = select.value; };
  select.addEventListener('change', () => {
    set();
    try { localStorage.setItem('dtrain-theme', select.value); } catch { /* it holds until the page is closed */ }
  });
  set();
}

function drawn(data) {
  settings.several = data.several;
  const box = document.querySelector('.charts');
  for (const [name, chart] of charts) {
    if (!data.charts.some(one => one.name === name)) {
      chart.box.remove();
      charts.delete(name);
    }
  }
  for (const one of data.charts) {
    if (!charts.has(one.name)) charts.set(one.name, new Chart(settings));
    const chart = charts.get(one.name);
    if (chart.box.parentNode !== box) box.append(chart.box);
    chart.update(one, data.steps, data.changes);
  }
  byId('smooth').hidden = !data.charts.some(one => one.lines.some(line => !line.exact));
}

function controls() {
  const slider = byId('smoothing'), log = byId('log');
  const set = () => {
    settings.smoothing = +slider.value;
    settings.logarithmic = log.checked;
    byId('share').textContent = settings.smoothing.toFixed(2);
    for (const chart of charts.values()) chart.draw();
  };
  slider.addEventListener('input', set);
  log.addEventListener('change', set);
  set();
}

function samples() {
  for (const box of document.querySelectorAll('.samples')) {
    const slider = box.querySelector('input'), images = [...box.querySelectorAll('img')];
    const show = () => {
      images.forEach((image, index) => { image.hidden = index !== +slider.value; });
      const step = (+images[+slider.value].dataset.step).toLocaleString('en');
      box.querySelector('span').textContent = step;
      slider.setAttribute('aria-valuetext', `step ${step}`);
    };
    slider.addEventListener('input', show);
    show();
  }
}

// The parts that changed take the place of the old ones; an open list stays open.
function replaced(parts) {
  for (const [name, html] of Object.entries(parts)) {
    const part = byId(name);
    if (!part || part.dataset.html === html) continue;
    const open = [...part.querySelectorAll('details')].map(one => one.open);
    part.dataset.html = html;
    part.innerHTML = html;
    part.querySelectorAll('details').forEach((one, index) => { one.open = open[index] ?? false; });
    if (name === 'examples') samples();
  }
}

async function follow(main, take) {
  const state = byId('live'), known = {version: main.dataset.version, examples: main.dataset.examples};
  const say = text => { if (state.textContent !== text) state.textContent = text; };
  for (;;) {
    await new Promise(resolve => setTimeout(resolve, EVERY));
    if (document.hidden) continue;
    try {
      const query = new URLSearchParams(Object.entries(known).filter(([, value]) => value));
      const answer = await fetch(`${main.dataset.live}&${query}`, {cache: 'no-store'});
      if (answer.status !== 200 && answer.status !== 204) throw new Error(await answer.text());
      if (answer.status === 200) {
        const data = await answer.json();
        Object.assign(known, {version: data.version, examples: data.examples});
        take(data);
      }
      say('live');
    } catch (error) {
      const gone = error instanceof TypeError;
      say(gone ? 'no connection to `dtrain report --serve`; what is shown is old' : error.message);
    }
  }
}

theme();
const data = byId('data'), main = document.querySelector('main');
if (data) {
  controls();
  drawn(JSON.parse(data.textContent));
  samples();
  if (main.dataset.live) {
    follow(main, news => {
      replaced(news.parts);
      drawn(news.charts);
    });
  }
}
