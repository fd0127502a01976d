// The KV cache as a sheet of blocks.

import { legendColour, penOf, roomFor } from "./canvas.js";

const GAP = 2;

/** Per block: how many requests hold it, the first that does, and the root of its tree of prefixes. */
function read(view) {
  const owner = new Array(view.num_blocks).fill(-1);
  view.tables.forEach((table, index) => {
    for (const block of table.blocks) if (owner[block] < 0) owner[block] = index;
  });
  const root = new Array(view.num_blocks).fill(-1);
  for (let block = 0; block < view.num_blocks; block++) {
    if (!view.cached[block]) continue;
    const path = [];
    let at = block;
    while (root[at] < 0 && view.parent[at] >= 0) {
      path.push(at);
      at = view.parent[at];
    }
    const found = root[at] < 0 ? at : root[at];
    root[at] = found;
    for (const each of path) root[each] = found;
  }
  return { owner, root };
}

/** Hues for the first requests, far from each other; never the yellow of shared blocks. */
const HUES = [212, 158, 282, 334, 188, 248, 128, 306];

const places = new Map();

/** A place for each name, the lowest that is free; it is kept for as long as the name is there. */
function placesOf(names) {
  for (const name of places.keys()) if (!names.includes(name)) places.delete(name);
  for (const name of names) {
    if (places.has(name)) continue;
    const taken = new Set(places.values());
    let place = 0;
    while (taken.has(place)) place++;
    places.set(name, place);
  }
  return places;
}

function hue(place) {
  return HUES[place] ?? 90 + ((place * 137.508) % 250);
}

/** Columns and the size of a cell so that all blocks fill a width, and fit a height where that is possible. */
function layout(count, width, height) {
  for (let columns = Math.max(1, Math.floor((width - GAP) / (22 + GAP))); ; columns++) {
    const size = (width - GAP) / columns - GAP;
    if (size < 4) break;
    if (Math.ceil(count / columns) * (size + GAP) + GAP <= height) return { columns, size };
  }
  return { columns: Math.max(1, Math.floor((width - GAP) / (3 + GAP))), size: 3 };
}

/** Draw a view of the cache; ``mine`` are requests of the chat that is open. Returns a sentence about it. */
export function draw(canvas, view, mine) {
  const freeColour = legendColour("free", "backgroundColor");
  const mineColour = legendColour("mine", "color");
  const myBlocks = new Set(view.tables.filter((t) => mine.has(t.request)).flatMap((t) => t.blocks));
  const { columns, size } = layout(view.num_blocks, roomFor(canvas), 420);
  const width = columns * (size + GAP) + GAP;
  const height = Math.ceil(view.num_blocks / columns) * (size + GAP) + GAP;
  const pen = penOf(canvas, width, height);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.font = `${Math.max(8, size - 8)}px system-ui, sans-serif`;
  const { owner, root } = read(view);
  const names = view.tables.map((table) => table.request ?? table.tenant);
  const place = placesOf(names);
  let shared = 0;
  for (let block = 0; block < view.num_blocks; block++) {
    const x = GAP + (block % columns) * (size + GAP);
    const y = GAP + Math.floor(block / columns) * (size + GAP);
    const refs = view.refs[block];
    if (refs > 1) {
      shared++;
      pen.fillStyle = `hsl(42 80% ${Math.max(42, 66 - 4 * refs)}%)`;
    } else if (refs === 1) {
      pen.fillStyle = `hsl(${hue(place.get(names[owner[block]]) ?? 0)} 42% 52%)`;
    } else if (view.cached[block]) {
      pen.fillStyle = `hsl(${90 + ((root[block] * 137.508) % 250)} 18% 55% / .55)`;
    } else {
      pen.fillStyle = freeColour;
    }
    pen.beginPath();
    pen.roundRect(x, y, size, size, size / 6);
    pen.fill();
    if (refs > 1 && size >= 14) {
      pen.fillStyle = "#1d2426";
      pen.fillText(String(refs), x + size / 2, y + size / 2 + 1);
    }
    if (myBlocks.has(block)) {
      pen.strokeStyle = mineColour;
      pen.lineWidth = 2;
      pen.beginPath();
      pen.roundRect(x + 1, y + 1, size - 2, size - 2, size / 8);
      pen.stroke();
    }
  }
  const { used, cached, free } = view.blocks;
  canvas.dataset.shared = String(shared);
  return (
    `${view.num_blocks} blocks of ${view.block_size} tokens: ${used} in use` +
    ` (${shared} of them shared), ${cached} cached, ${free} free.`
  );
}
