// What the last answer's attention read: layers upwards, positions to the right.

import { legendColour, penOf, roomFor } from "./canvas.js";

const ROW = 5;

/** Draw the share read of each span of positions; ``reads`` is usage.attn_reads[0] of an answer. */
export function drawReads(canvas, reads) {
  const layers = reads.share.length;
  const spans = reads.share[0].length;
  const width = Math.max(60, roomFor(canvas));
  const pen = penOf(canvas, width, layers * ROW);
  pen.fillStyle = legendColour("read", "color");
  const cell = width / spans;
  reads.share.forEach((row, layer) => {
    row.forEach((share, span) => {
      if (!share) return;
      // Small shares must be seen: the root lifts them.
      pen.globalAlpha = Math.max(0.08, Math.sqrt(share));
      pen.fillRect(span * cell, (layers - 1 - layer) * ROW, Math.max(cell, 1), ROW - 1);
    });
  });
}

/** The same in a sentence, for those who cannot see it; ``topk`` is usage.attn_topk. */
export function sayReads(reads, topk) {
  const spans = reads.share[0].length;
  const untouched = reads.share[0].filter((_, span) => reads.share.every((row) => !row[span])).length;
  const parts = [
    `Read for the last answer: ${reads.share.length} layers upwards, ${spans * reads.span} positions to the right;`,
    ` ${untouched} of ${spans} spans of ${reads.span} by nobody.`,
  ];
  if (topk) {
    parts.push(` Kept ${percent(topk.kept_keys / topk.visible_keys)} of the keys, prompt and answer;`);
    parts.push(` at most ${percent(topk.mean_dropped_mass)} of the attention's mass was left out on average.`);
  }
  return parts.join("");
}

function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}
