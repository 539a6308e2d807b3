// Formats numbers for people: three digits and a unit.

const digits = (value) => {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 99.95) return value.toFixed(0);
  return value.toFixed(size >= 9.995 ? 1 : 2);
};

const TIME_UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

/** Returns the unit in which a time has one to three digits before the point. */
const timeUnit = (seconds) => TIME_UNITS.find(([size]) => Math.abs(seconds) >= size) ?? TIME_UNITS[seconds ? 3 : 0];

const formatSeconds = (seconds) => {
  const [size, name] = timeUnit(seconds);
  return `${digits(seconds / size)} ${name}`;
};

const formatNs = (ns) => formatSeconds(ns / 1e9);

const formatPercent = (fraction) => `${(fraction * 100).toFixed(1)} %`;

const formatCount = (count) => count.toLocaleString("en-US");

const formatBytes = (bytes) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const place = Math.min(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), units.length - 1);
  return place ? `${(bytes / 1000 ** place).toFixed(1)} ${units[place]}` : `${bytes} B`;
};

/** Formats a value of a quantity whose name ends with its unit. */
const formatQuantity = (name, value) => {
  if (name.endsWith("seconds")) return formatSeconds(value);
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return formatCount(Math.round(value));
  return digits(value);
};

/** Makes a name of words: `cost_seconds` becomes `cost`, in seconds. */
const quantityLabel = (name) => name.replace(/_seconds$/, "").replaceAll("_", " ");

const plural = (count, word) => `${formatCount(count)} ${word}${count === 1 ? "" : "s"}`;
