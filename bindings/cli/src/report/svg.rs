//! Writes SVG elements: horizontal positions in percent of the chart, vertical positions in pixels.

use std::fmt::Write;

/// Escapes text for use inside an element or a quoted attribute.
pub(super) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
    }
    safe
}

/// Part of a text that its position refers to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// Position of a text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spot {
    /// Percent of the width.
    pub(super) x: f64,
    /// Offset to the right, in pixels.
    pub(super) dx: f64,
    /// Baseline, in pixels.
    pub(super) y: f64,
    pub(super) anchor: Anchor,
}

/// Draws a rectangle with a tooltip, which may be empty.
///
/// - `xs`, `ys`: start and end, in percent and pixels
pub(super) fn rect(out: &mut String, class: &str, xs: [f64; 2], ys: [f64; 2], tooltip: &str) {
    let (width, height) = (xs[1] - xs[0], ys[1] - ys[0]);
    let place = format!("x=\"{:.2}%\" y=\"{}\" width=\"{width:.2}%\" height=\"{height}\"", xs[0], ys[0]);
    element(out, "rect", class, &place, tooltip);
}

/// Draws a dot with a tooltip; the radius is in pixels.
pub(super) fn dot(out: &mut String, class: &str, x: f64, y: f64, radius: f64, tooltip: &str) {
    element(out, "circle", class, &format!("cx=\"{x:.2}%\" cy=\"{y}\" r=\"{radius}\""), tooltip);
}

/// Draws a vertical line.
pub(super) fn upright(out: &mut String, class: &str, x: f64, ys: [f64; 2]) {
    let place = format!("x1=\"{x:.2}%\" x2=\"{x:.2}%\" y1=\"{}\" y2=\"{}\"", ys[0], ys[1]);
    element(out, "line", class, &place, "");
}

/// Draws a horizontal line over the whole width.
pub(super) fn level(out: &mut String, class: &str, y: f64) {
    element(out, "line", class, &format!("x1=\"0%\" x2=\"100%\" y1=\"{y}\" y2=\"{y}\""), "");
}

/// Draws a text.
pub(super) fn text(out: &mut String, class: &str, spot: Spot, text: &str) {
    let anchor = match spot.anchor {
        Anchor::Start => "start",
        Anchor::Middle => "middle",
        Anchor::End => "end",
    };
    let (x, dx, y) = (spot.x, spot.dx, spot.y);
    let shift = if dx == 0.0 { String::new() } else { format!(" dx=\"{dx}\"") };
    // Writing to a string never fails.
    let _ = write!(
        out,
        "<text class=\"{class}\" x=\"{x:.2}%\"{shift} y=\"{y}\" text-anchor=\"{anchor}\">{}</text>",
        escape(text)
    );
}

fn element(out: &mut String, name: &str, class: &str, place: &str, tooltip: &str) {
    let _ = if tooltip.is_empty() {
        write!(out, "<{name} class=\"{class}\" {place}/>")
    } else {
        write!(out, "<{name} class=\"{class}\" {place}><title>{}</title></{name}>", escape(tooltip))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_text_is_harmless() {
        assert_eq!(escape("<a b='c'>\"&"), "&lt;a b=&#39;c&#39;&gt;&quot;&amp;");
        let mut out = String::new();
        dot(&mut out, "d", 12.3456, 4.0, 2.0, "<x>");
        assert_eq!(
            out,
            "<circle class=\"d\" cx=\"12.35%\" cy=\"4\" r=\"2\"><title>&lt;x&gt;</title></circle>"
        );
    }
}
