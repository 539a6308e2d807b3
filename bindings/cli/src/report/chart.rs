//! Draws the frame of all charts: labels of fixed width on the left, a plot that fills the rest.

use std::fmt::Write;

use super::svg::{self, Anchor, Spot, escape};

/// Height of the axis below a plot, in pixels.
pub(super) const AXIS_HEIGHT: f64 = 20.0;

/// Number of colors for modules, which the style sheet defines; further modules repeat them.
const COLORS: usize = 4;

/// A chart under construction.
#[derive(Debug, Default)]
pub(super) struct Chart {
    labels: String,
    /// SVG elements of the plot.
    pub(super) plot: String,
}

impl Chart {
    /// Writes a label to the left of a row of the plot whose middle is at `y` pixels.
    pub(super) fn label(&mut self, y: f64, text: &str) {
        let spot = Spot { x: 100.0, dx: -8.0, y: y + 4.0, anchor: Anchor::End };
        svg::text(&mut self.labels, "label", spot, text);
    }

    /// Completes the chart.
    ///
    /// - `height`: pixels, the axis included
    /// - `title`, `description`: for screen readers
    pub(super) fn finish(self, height: f64, title: &str, description: &str) -> String {
        let Self { labels, plot } = self;
        let (title, description) = (escape(title), escape(description));
        format!(
            "<div class=\"chart\"><svg class=\"labels\" height=\"{height}\" aria-hidden=\"true\">{labels}</svg>\
             <svg class=\"plot\" height=\"{height}\" role=\"img\"><title>{title}</title><desc>{description}</desc>\
             {plot}</svg></div>\n"
        )
    }
}

/// Writes a legend: swatches of CSS classes and their meaning.
pub(super) fn legend(entries: &[(String, String)]) -> String {
    let mut out = String::from("<ul class=\"legend\">");
    for (class, meaning) in entries {
        // Writing to a string never fails.
        let _ = write!(out, "<li><svg class=\"swatch\" width=\"14\" height=\"14\" aria-hidden=\"true\">");
        svg::rect(&mut out, class, [0.0, 100.0], [0.0, 14.0], "");
        let _ = write!(out, "</svg>{}</li>", escape(meaning));
    }
    out.push_str("</ul>\n");
    out
}

/// Returns the color class of a module: `c0` to `c3`.
pub(super) fn color(module: usize) -> String {
    format!("c{}", module % COLORS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_a_title_and_a_description() {
        let mut chart = Chart::default();
        chart.label(10.0, "rank 0");
        let html = chart.finish(40.0, "load & time", "two bars");
        assert!(html.contains("<title>load &amp; time</title><desc>two bars</desc>"));
        assert!(html.contains(">rank 0</text>"));
    }
}
