// What both drawings need of a canvas.

/** Size a canvas in CSS pixels, sharp on every screen; returns its cleared pen in the same units. */
export function penOf(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return pen;
}

/** CSS pixels that a canvas may be wide: its frame's, less its border. */
export function roomFor(canvas) {
  return (canvas.parentElement.clientWidth || 300) - 2;
}

/** A colour of the legend as it came out; a canvas does not know light-dark() itself. */
export function legendColour(name, property) {
  return getComputedStyle(document.querySelector(`.swatch.${name}`))[property];
}
