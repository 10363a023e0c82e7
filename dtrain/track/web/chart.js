// Curves over the step, as SVG that is drawn anew at every change of width, data, zoom or smoothing.
const MOST_TICKS = 30;
const SVG = 'http://www.w3.org/2000/svg';
const HEIGHT = 260, MARGIN = 58, RIGHT = 12, TOP = 10, BOTTOM = 36;
const FEW = 20;  // points up to which each has a marker
const ROWS = 500;  // most rows of a table of values
const DASHES = ['', '7 4', '2 3', '9 3 2 3'];  // train, eval, and both of lines that use a colour a second time
const COLOURS = 8;

function make(tag, attributes = {}, ...children) {
  const svg = ['svg', 'g', 'path', 'line', 'text', 'rect', 'circle', 'clipPath'].includes(tag);
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Exponential moving mean, corrected for the first points, of dtrain/track/charts.py.
function smoothed(values, share) {
  let mean = 0, weight = 0;
  return values.map(value => {
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

function shown(value) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e9)) {
    return value.toExponential(3).replace(/\.?0+e/, 'e').replace('e+', 'e');
  }
  return value.toLocaleString('en', {maximumSignificantDigits: Math.abs(value) >= 1e5 ? 6 : 5});
}

// Round numbers between two values: 1, 2 or 5 times a power of ten apart; on a logarithmic axis powers of ten, of which
// short ranges have 2 and 5 times as well.
function ticks(low, high, logarithmic, most, whole = false) {
  const found = [];
  if (logarithmic) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const every = Math.max(1, Math.ceil((last - first) / most));
    for (let power = first; power <= last; power += every) {
      for (const factor of last - first <= 3 ? [1, 2, 5] : [1]) found.push(factor * 10 ** power);
    }
    const seen = found.filter(value => value >= low * 0.999 && value <= high * 1.001 && isFinite(value));
    if (seen.length >= 3) return seen;
    found.length = 0;  // those of a linear axis, at their places on the logarithmic one
  }
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999) * power;
  if (whole) step = Math.max(1, Math.round(step));
  const start = Math.ceil(low / step - 1e-9);
  for (let index = 0; index < MOST_TICKS && (start + index) * step <= high + 1e-9 * step; index++) {
    found.push(+((start + index) * step).toPrecision(15));
  }
  return [...new Set(found)].filter(value => !logarithmic || value > 0);
}

// Labels of an axis, with as many digits as tell its ticks apart.
function labels(values) {
  const powers = values.every((value, index) => value > 0 && (!index || value > 1.9 * values[index - 1]));
  if (powers && values.length > 1) return values.flatMap(value => labels([value]));
  const largest = Math.max(...values.map(Math.abs)), gaps = values.slice(1).map((value, index) => value - values[index]);
  const step = Math.min(...gaps.filter(gap => gap > 0), largest || 1);
  const [unit, name] = [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1, '']].find(([size]) => largest >= size) || [1, ''];
  if (largest && (largest < 1e-3 || largest >= 1e15 || step / unit < 1e-9)) {
    const power = value => Math.floor(Math.log10(Math.abs(value)) + 1e-9);
    const digits = value => Math.max(0, Math.min(12, power(value) - power(step)));
    return values.map(value => value ? value.toExponential(digits(value)).replace('e+', 'e') : '0');
  }
  const maximumFractionDigits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
  return values.map(value => value ? (value / unit).toLocaleString('en', {maximumFractionDigits}) + name : '0');
}

class Chart {
  constructor(settings) {
    this.settings = settings;  // of the page: smoothing, logarithmic, several
    this.hidden = new Set();
    this.zoom = null;  // the first and the last step that are drawn
    this.cursor = null;  // a step
    this.note = make('span');
    this.title = make('b');
    this.plot = make('div', {class: 'plot', tabindex: '0', role: 'application', 'aria-roledescription': 'chart'});
    this.tip = make('div', {class: 'tip', hidden: ''});
    this.spoken = make('div', {class: 'hidden', role: 'status'});
    this.legend = make('div', {class: 'legend'});
    this.table = make('details', {}, make('summary', {}, 'values as a table'));
    this.table.addEventListener('toggle', () => this.fill());
    this.box = make('figure', {class: 'chart'}, make('figcaption', {}, this.title, this.note),
                    this.plot, this.legend, this.table, this.spoken);
    this.listen();
    new ResizeObserver(() => { if (Math.round(this.box.clientWidth) !== this.width) this.draw(); }).observe(this.box);
  }

  update(data, steps, changes) {
    this.data = data;
    this.changes = changes;
    this.lines = data.lines.map(line => {
      const {several} = this.settings, number = this.settings.number(several ? line.run : line.short || 'train');
      const label = several ? `${line.run} ${line.short}`.trim() : line.short || data.title;
      const dash = DASHES[(line.eval ? 1 : 0) + 2 * (Math.floor(number / COLOURS) % 2)];
      return {...line, label, steps: steps[line.step], colour: `--line: var(--c${number % COLOURS})`, dash};
    });
    this.title.textContent = data.title;
    const names = JSON.stringify(this.lines.map(line => [line.label, line.colour]));
    if (names !== this.names) {  // else a button that has the focus keeps it
      this.names = names;
      this.legend.replaceChildren(...(this.lines.length > 1 ? this.lines.map(line => this.button(line)) : []));
    }
    this.fill();
    this.draw();
  }

  button(line) {
    const sample = make('i', {style: line.colour, class: line.eval ? 'eval' : ''});
    const button = make('button', {type: 'button', 'aria-pressed': String(!this.hidden.has(line.label))}, sample, line.label);
    button.addEventListener('click', () => {
      if (!this.hidden.delete(line.label)) this.hidden.add(line.label);
      button.setAttribute('aria-pressed', String(!this.hidden.has(line.label)));
      this.draw();
    });
    return button;
  }

  get seen() { return this.lines.filter(line => !this.hidden.has(line.label)); }

  // The values of a line as they are drawn: those of few or exact points as logged.
  values(line) {
    return line.exact ? line.mean : smoothed(line.mean, this.settings.smoothing);
  }

  // The first and last step, and the lowest and highest value within the zoom.
  extent() {
    const ends = this.seen.flatMap(line => [line.steps[0], line.steps.at(-1)]);
    let [first, last] = this.zoom || [Math.min(...ends), Math.max(...ends)];
    if (!ends.length) [first, last] = [0, 1];
    if (first === last) [first, last] = [first - 1, last + 1];
    let low = Infinity, high = -Infinity, positive = Infinity;
    for (const line of this.seen) {
      line.steps.forEach((step, index) => {
        if (step < first || step > last) return;
        for (const value of [line.mean[index], ...(line.low ? [line.low[index], line.high[index]] : [])]) {
          low = Math.min(low, value);
          high = Math.max(high, value);
          if (value > 0) positive = Math.min(positive, value);
        }
      });
    }
    if (low === Infinity) [low, high] = [0, 1];
    const logarithmic = this.settings.logarithmic && positive < Infinity;
    if (logarithmic) return {first, last, low: positive / 1.05, high: Math.min(high * 1.05, Number.MAX_VALUE), logarithmic};
    const margin = 0.04 * (high - low) || Math.abs(high) * 0.05 || 1;
    return {first, last, low: low - margin, high: high + margin, logarithmic};
  }

  draw() {
    const width = this.width = Math.round(this.box.clientWidth);
    if (!this.data || !width) return;
    const range = this.extent(), {first, last, low, high, logarithmic} = range;
    const up = ticks(low, high, logarithmic, 5), texts = labels(up);
    const left = Math.max(MARGIN, 14 + 6.4 * Math.max(...texts.map(text => text.length)));
    const right = width - RIGHT, bottom = HEIGHT - BOTTOM;
    const along = logarithmic ? Math.log10 : value => value;
    const x = step => left + (step - first) / (last - first) * (right - left);
    const y = value => bottom - (along(value) - along(low)) / (along(high) - along(low)) * (bottom - TOP);
    this.scale = {x, logarithmic, middle: (left + right) / 2, step: place => first + (place - left) / (right - left) * (last - first), first, last, right, bottom};
    const svg = make('svg', {viewBox: `0 0 ${width} ${HEIGHT}`, role: 'img', 'aria-label': this.described(range)});
    up.forEach((value, index) => {
      svg.append(make('line', {class: 'grid', x1: left, x2: right, y1: y(value), y2: y(value)}),
                 make('text', {x: left - 6, y: y(value) + 4, 'text-anchor': 'end'}, texts[index]));
    });
    const across = ticks(first, last, false, Math.max(2, Math.floor(width / 85)), true), steps = labels(across);
    across.forEach((step, index) => {
      const anchor = x(step) + 3.2 * steps[index].length > width ? 'end' : 'middle';
      svg.append(make('line', {class: 'axis', x1: x(step), x2: x(step), y1: bottom, y2: bottom + 4}),
                 make('text', {x: x(step), y: bottom + 16, 'text-anchor': anchor}, steps[index]));
    });
    svg.append(make('line', {class: 'axis', x1: left, x2: right, y1: bottom, y2: bottom}),
               make('text', {x: (left + right) / 2, y: HEIGHT - 4, 'text-anchor': 'middle'}, 'step'));
    const clip = `clip-${this.data.name}`.replace(/[^\w-]/g, '_');
    const inside = make('g', {'clip-path': `url(#${clip})`});
    svg.append(make('clipPath', {id: clip},
                    make('rect', {x: left - 4, y: TOP - 4, width: Math.max(0, right - left) + 8, height: bottom - TOP + 8})), inside);
    for (const step of this.changes) {
      inside.append(make('line', {class: 'changed', x1: x(step), x2: x(step), y1: TOP, y2: bottom}));
    }
    const possible = value => !logarithmic || value > 0;
    const path = (line, values) => {
      let text = '', pen = 'M';
      values.forEach((value, index) => {
        if (!possible(value)) { pen = 'M'; return; }
        text += `${pen}${x(line.steps[index]).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = 'L';
      });
      return text;
    };
    for (const line of this.seen) {
      if (line.low) {
        const edge = line.low.map((value, index) => [x(line.steps[index]), y(logarithmic ? Math.max(value, low) : value)]);
        const back = line.high.map((value, index) => [x(line.steps[index]), y(logarithmic ? Math.max(value, low) : value)]);
        const points = [...edge, ...back.reverse()].map(([left, up]) => `${left.toFixed(1)} ${up.toFixed(1)}`);
        inside.append(make('path', {class: 'band', style: line.colour, d: `M${points.join('L')}Z`}));
      }
      if (!line.exact) inside.append(make('path', {class: 'faint', style: line.colour, d: path(line, line.mean)}));
    }
    for (const line of this.seen) {
      const values = line.drawn = this.values(line);
      inside.append(make('path', {style: line.colour, 'stroke-dasharray': line.dash, d: path(line, values)}));
      if (line.exact && (line.eval || values.length <= FEW) && values.length <= 5 * FEW) {
        values.forEach((value, index) => possible(value) &&
          inside.append(make('circle', {style: line.colour, cx: x(line.steps[index]), cy: y(value), r: 2.5})));
      }
    }
    this.marker = make('line', {class: 'cursor', y1: TOP, y2: bottom, visibility: 'hidden'});
    this.chosen = make('rect', {class: 'chosen', y: TOP, height: bottom - TOP, visibility: 'hidden'});
    inside.append(this.chosen, this.marker);
    this.plot.replaceChildren(svg, this.tip);
    this.plot.setAttribute('aria-label', `${this.data.title}. Arrow keys read the values, plus and minus zoom, Escape resets.`);
    this.note.textContent = this.drawn();
    if (this.cursor !== null) this.point(this.cursor);
  }

  // What the points are that are not smoothed.
  get plain() {
    return this.data.stride > 1 ? `means of up to ${this.data.stride.toLocaleString('en')} rows` : 'as logged';
  }

  // How the lines are drawn, in words.
  drawn() {
    const noisy = this.seen.some(line => !line.exact), smooth = this.settings.smoothing;
    const parts = noisy && smooth ? [`smoothed ${smooth.toFixed(2)}, faint: ${this.plain}`] : [this.plain];
    const zeros = this.seen.some(line => line.mean.some(value => value <= 0));
    if (this.settings.logarithmic && zeros) {
      parts.push(this.scale.logarithmic ? 'values of 0 and below are not drawn' : 'linear: no value is above 0');
    }
    return parts.join('; ');
  }

  // The chart in a sentence, for those who do not see it.
  described({first, last}) {
    const read = (line, index) => `${shown(line.mean[index])} at step ${line.steps[index].toLocaleString('en')}`;
    const about = this.seen.slice(0, 6).map(line => {
      const from = line.steps.findIndex(step => step >= first), to = line.steps.findLastIndex(step => step <= last);
      return from < 0 || to < from ? `${line.label} has no point here`
        : from === to ? `${line.label} ${read(line, from)}` : `${line.label} from ${read(line, from)} to ${read(line, to)}`;
    });
    const more = this.seen.length > 6 ? `; and ${this.seen.length - 6} more lines` : '';
    return `${this.data.title}, steps ${Math.round(first).toLocaleString('en')} to ${Math.round(last).toLocaleString('en')}: ` +
      about.join('; ') + more;
  }

  get places() { return [...new Set(this.seen.flatMap(line => line.steps))].sort((one, other) => one - other); }

  // Show the values at the nearest step that has some.
  point(step, aloud = false) {
    const places = this.places.filter(place => place >= this.scale.first && place <= this.scale.last);
    if (!places.length) return;
    this.cursor = places.reduce((best, place) => Math.abs(place - step) < Math.abs(best - step) ? place : best);
    const rows = [];
    for (const line of this.seen) {
      let index = line.steps.findLastIndex(place => place <= this.cursor);
      if (index < 0) continue;
      const values = line.drawn, other = line.steps[index] === this.cursor ? '' : ` at ${line.steps[index].toLocaleString('en')}`;
      const name = this.data.stride > 1 ? 'mean' : 'as logged';
      const logged = line.exact || !this.settings.smoothing ? '' : ` (${name} ${shown(line.mean[index])})`;
      const range = line.low ? `, ${shown(line.low[index])} to ${shown(line.high[index])}` : '';
      rows.push([line, `${line.label} ${shown(values[index])}${logged}${range}${other}`]);
    }
    const head = `step ${this.cursor.toLocaleString('en')}`;
    this.tip.replaceChildren(make('b', {}, head), ...rows.slice(0, 16).map(([line, text]) =>
      make('div', {}, make('i', {style: line.colour, class: line.eval ? 'eval' : ''}), text)));
    this.tip.hidden = false;
    const place = this.scale.x(this.cursor);
    if (place > this.scale.middle) this.tip.style.cssText = `right: ${this.box.clientWidth - place + 10}px`;
    else this.tip.style.cssText = `left: ${place + 10}px`;
    this.marker.setAttribute('x1', place);
    this.marker.setAttribute('x2', place);
    this.marker.setAttribute('visibility', 'visible');
    if (aloud) this.spoken.textContent = [head, ...rows.map(([, text]) => text)].join(', ');
  }

  leave() {
    this.cursor = null;
    this.tip.hidden = true;
    this.marker?.setAttribute('visibility', 'hidden');
  }

  range(first, last) {
    const places = this.places, inside = first === null ? [] : places.filter(place => place >= first && place <= last);
    if (first === null || inside.length === places.length) this.zoom = null;  // and what is new is seen
    else if (inside.length) this.zoom = [Math.max(first, places[0]), Math.min(last, places.at(-1))];
    this.draw();
  }

  listen() {
    const at = event => event.clientX - this.plot.getBoundingClientRect().left;
    let start = null;
    this.plot.addEventListener('pointerdown', event => {
      if (event.button) return;
      start = at(event);
      if (event.pointerType === 'mouse') this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener('pointermove', event => {
      if (!this.scale) return;
      this.point(this.scale.step(at(event)));
      if (start === null || event.pointerType !== 'mouse') return;
      this.chosen.setAttribute('x', Math.min(start, at(event)));
      this.chosen.setAttribute('width', Math.abs(at(event) - start));
      this.chosen.setAttribute('visibility', 'visible');
    });
    this.plot.addEventListener('pointerup', event => {
      const [from, to] = [Math.min(start, at(event)), Math.max(start, at(event))], dragged = start !== null && to - from > 6;
      start = null;
      if (dragged && event.pointerType === 'mouse') this.range(this.scale.step(from), this.scale.step(to));
      else this.chosen.setAttribute('visibility', 'hidden');
    });
    this.plot.addEventListener('pointerleave', () => this.leave());
    this.plot.addEventListener('blur', () => this.leave());
    this.plot.addEventListener('dblclick', () => this.range(null));
    this.plot.addEventListener('keydown', event => this.key(event));
  }

  key(event) {
    if (!this.scale || event.ctrlKey || event.metaKey || event.altKey) return;
    const places = this.places.filter(place => place >= this.scale.first && place <= this.scale.last);
    const index = this.cursor === null ? -1 : places.indexOf(this.cursor), by = event.shiftKey ? 10 : 1;
    const middle = this.cursor ?? (this.scale.first + this.scale.last) / 2, wide = this.scale.last - this.scale.first;
    const go = number => this.point(places[Math.max(0, Math.min(places.length - 1, number))], true);
    const keys = {
      ArrowRight: () => go(index + by), ArrowLeft: () => go(index < 0 ? places.length - 1 : index - by),
      Home: () => go(0), End: () => go(places.length - 1),
      '+': () => this.range(middle - wide / 4, middle + wide / 4), '-': () => this.range(middle - wide, middle + wide),
      Escape: () => { this.leave(); this.range(null); },
    };
    const action = keys[event.key === '=' ? '+' : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // The table of values, which is only made when it is open.
  fill() {
    if (!this.table.open) return;
    const all = [...new Set(this.lines.flatMap(line => line.steps))].sort((one, other) => one - other);
    const every = Math.ceil(all.length / ROWS), exact = new Set(this.lines.filter(line => line.exact).flatMap(line => line.steps));
    const many = exact.size > ROWS;  // a long curve of the learning rate has no noise, and is thinned as others are
    const places = all.filter((step, index) => index % every === 0 || index === all.length - 1 || (!many && exact.has(step)));
    const columns = this.lines.map(line => new Map(line.steps.map((step, index) => [step, line.mean[index]])));
    const head = make('tr', {}, ...['step', ...this.lines.map(line => line.label)].map(text => make('th', {scope: 'col'}, text)));
    const rows = places.map(step => make('tr', {}, make('th', {scope: 'row'}, step.toLocaleString('en')),
      ...columns.map(column => make('td', {}, column.has(step) ? shown(column.get(step)) : ''))));
    const some = every > 1 ? `, ${places.length.toLocaleString('en')} of ${all.length.toLocaleString('en')} steps` : '';
    const text = `${this.data.title}, ${this.plain}${some}`;
    const table = make('table', {}, make('caption', {}, text), make('thead', {}, head), make('tbody', {}, ...rows));
    this.table.replaceChildren(this.table.firstChild, make('div', {class: 'wide', tabindex: '0'}, table));
  }
}
