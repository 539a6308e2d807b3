//! Graphs in a single text line.

/// Blocks from the lowest to the highest.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Draws values as blocks, at most `width` blocks, each the mean of consecutive values; the lowest and the
/// highest mean have the lowest and the highest block.
pub(super) fn sparkline(values: &[f64], width: usize) -> String {
    let values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    if values.is_empty() || width == 0 {
        return String::new();
    }
    let columns = width.min(values.len());
    let mean = |column: usize| {
        let [from, to] = [column, column + 1].map(|edge| edge * values.len() / columns);
        values[from..to].iter().sum::<f64>() / (to - from) as f64
    };
    let means: Vec<f64> = (0..columns).map(mean).collect();
    let [low, high] = [
        means.iter().copied().fold(f64::INFINITY, f64::min),
        means.iter().copied().fold(f64::NEG_INFINITY, f64::max),
    ];
    let block = |mean: &f64| {
        let height = if high > low { (mean - low) / (high - low) } else { 0.5 };
        BLOCKS[((height * 7.0).round() as usize).min(7)]
    };
    means.iter().map(block).collect()
}

/// Draws a fraction from 0 to 1 as a bar with `width` characters.
pub(super) fn bar(share: f64, width: usize) -> String {
    let full = ((share.clamp(0.0, 1.0) * width as f64).round() as usize).min(width);
    "█".repeat(full) + &"░".repeat(width - full)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_become_blocks_between_their_extremes() {
        assert_eq!(sparkline(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 20), "▁▂▃▄▅▆▇█");
        assert_eq!(sparkline(&[4.0, 4.0, f64::NAN, 1.0, 3.0], 2), "█▁");
        assert_eq!(sparkline(&[2.0; 9], 3), "▅▅▅");
        assert_eq!((sparkline(&[], 5), sparkline(&[1.0], 0)), (String::new(), String::new()));
        let many: Vec<f64> = (0..1_000).map(f64::from).collect();
        assert_eq!(sparkline(&many, 30).chars().count(), 30);
    }

    #[test]
    fn bars_have_their_width() {
        assert_eq!([bar(0.0, 4), bar(0.5, 4), bar(1.0, 4), bar(7.0, 4)], ["░░░░", "██░░", "████", "████"]);
    }
}
