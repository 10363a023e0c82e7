// The table of runs: sorted by a column, filtered by words, with boxes for the runs that are compared.
const table = document.querySelector('.runs'), filter = byId('filter'), compare = byId('compare'), chosen = new Set();
const sorting = {column: 'changed', falling: true}, TEXTS = ['name', 'state', 'problem'];
const behind = Date.now() / 1000 - main.dataset.now;  // this clock against that of the server

function ago(seconds) {
  for (const [unit, name] of [[86400, 'd'], [3600, 'h'], [60, 'min']]) {
    if (seconds >= unit) return `${Math.floor(seconds / unit)} ${name}`;
  }
  return `${Math.max(0, Math.floor(seconds))} s`;
}

function ages() {
  for (const age of table.querySelectorAll('[data-column=changed]')) {
    age.textContent = ago(Date.now() / 1000 - behind - age.dataset.value);
  }
}

function arrange() {
  const body = table.tBodies[0], words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const value = row => row.querySelector(`[data-column="${sorting.column}"]`).dataset.value;
  const compared = (one, other) => {
    const [left, right] = [value(one), value(other)];
    if (left === '' || right === '') return (left === '') - (right === '');  // what has no value comes last
    const order = TEXTS.includes(sorting.column) ? left.localeCompare(right, 'en', {numeric: true}) : left - right;
    return sorting.falling ? -order : order;
  };
  const rows = [...body.rows].sort(compared);
  for (const row of rows) {
    const text = row.textContent.toLowerCase(), box = row.querySelector('input');
    box.checked = chosen.has(box.value);
    row.hidden = !words.every(word => text.includes(word));
  }
  const focused = document.activeElement;
  body.append(...rows);
  if (body.contains(focused)) focused.focus();  // what is moved loses it
  ages();
  for (const head of table.tHead.querySelectorAll('[data-sort]')) {
    const here = head.dataset.sort === sorting.column;
    if (here) head.setAttribute('aria-sort', sorting.falling ? 'descending' : 'ascending');
    else head.removeAttribute('aria-sort');
  }
  const seen = rows.filter(row => !row.hidden).length;
  byId('count').textContent = `${seen.toLocaleString('en')} of ${rows.length.toLocaleString('en')} runs`;
  compare.disabled = !chosen.size || chosen.size > +main.dataset.most;
  compare.textContent = chosen.size > +main.dataset.most ? `at most ${main.dataset.most} runs`
    : chosen.size > 1 ? `compare ${chosen.size} runs` : 'open';
}

for (const head of table.tHead.querySelectorAll('[data-sort]')) {
  head.querySelector('button').addEventListener('click', () => {
    sorting.falling = sorting.column === head.dataset.sort ? !sorting.falling : head.dataset.sort !== 'name';
    sorting.column = head.dataset.sort;
    arrange();
  });
}
table.addEventListener('change', event => {
  if (event.target.checked) chosen.add(event.target.value);
  else chosen.delete(event.target.value);
  arrange();
});
filter.addEventListener('input', arrange);
compare.addEventListener('click', () => {
  const rows = [...table.tBodies[0].rows].map(row => row.querySelector('input').value);
  location.href = 'runs?' + new URLSearchParams(rows.filter(name => chosen.has(name)).map(name => ['run', name]));
});
follow(main, news => {
  // the box or the link that has the focus is found again by its run
  const key = one => one.value || one.getAttribute('href');
  const focused = document.activeElement?.closest?.('.runs tbody') ? key(document.activeElement) : null;
  table.tBodies[0].innerHTML = news.parts.rows;
  for (const name of chosen) {
    if (![...table.querySelectorAll('tbody input')].some(box => box.value === name)) chosen.delete(name);
  }
  arrange();
  if (focused) [...table.querySelectorAll('tbody input, tbody a')].find(one => key(one) === focused)?.focus();
});
arrange();
setInterval(ages, 1000);
