//! Renders the page of `dflop accuracy`: prediction errors over size, and by module and part.

use std::fmt::Write;

use dflop_costmodel::{AccuracyReport, ErrorSummary, ModuleAccuracy, PointAccuracy};

use super::chart::{AXIS_HEIGHT, Chart, legend};
use super::number;
use super::page::{CLOSING, notes, opening, summary};
use super::svg::{self, Anchor, Spot, escape};

const TOP: f64 = 8.0;
/// Half the height of a chart in pixels, for the largest error that is drawn to scale.
const HALF_HEIGHT: f64 = 90.0;
const ERROR_SHOWN_MAX: f64 = 0.5;
const RADIUS: f64 = 3.5;
/// Percentage of the width between the first and the last tick.
const REACH_PERCENT: f64 = 94.0;
const MARGIN_PERCENT: f64 = 3.0;

/// Renders the page, without scripts and network.
///
/// - `entries`: labels and values at the head of the page, such as the names of the files
#[must_use]
pub(crate) fn render_accuracy(title: &str, entries: &[(String, String)], report: &AccuracyReport) -> String {
    let mut page = opening(title);
    page.push_str(&summary(entries));
    page.push_str(&table(report));
    let sizes = SizeAxis::new(&report.points);
    for (color, module) in report.modules.iter().enumerate() {
        page.push_str(&section(module, color, report, &sizes));
    }
    let reasons: Vec<String> = report
        .unpredicted
        .iter()
        .map(|unpredicted| format!("{} points not compared: {}", unpredicted.count, unpredicted.reason))
        .collect();
    page.push_str(&notes(&reasons));
    page.push_str(CLOSING);
    page
}

fn table(report: &AccuracyReport) -> String {
    let mut out = String::from(
        "<section><h2>Errors</h2>\n<p>Predicted over observed time, less one. <em>Bias</em> is their mean; the others are of \
         their sizes.</p>\n<div class=\"scroll\"><table>\n<thead><tr><th scope=\"col\">Part</th>\
         <th scope=\"col\">Points</th><th scope=\"col\">Bias</th><th scope=\"col\">Mean</th><th scope=\"col\">Median</th>\
         <th scope=\"col\">95 %</th><th scope=\"col\">Largest</th></tr></thead>\n<tbody>\n",
    );
    for module in &report.modules {
        for part in &module.parts {
            row(&mut out, &format!("{} {} {}", module.module, part.part, part.phase), &part.errors);
        }
    }
    row(&mut out, "all", &report.errors);
    out.push_str("</tbody></table></div></section>\n");
    out
}

fn row(out: &mut String, name: &str, errors: &ErrorSummary) {
    let cells = [errors.bias, errors.mape, errors.p50, errors.p95, errors.max].map(number::percent);
    // Writing to a string never fails.
    let _ = writeln!(
        out,
        "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td></tr>",
        escape(name),
        errors.count,
        cells.join("</td><td>")
    );
}

fn section(module: &ModuleAccuracy, color: usize, report: &AccuracyReport, sizes: &SizeAxis) -> String {
    let mut chart = Chart::default();
    let middle = TOP + HALF_HEIGHT;
    for error in [-0.5, -0.25, 0.0, 0.25, 0.5] {
        let y = middle - error / ERROR_SHOWN_MAX * HALF_HEIGHT;
        svg::level(&mut chart.plot, if error == 0.0 { "zero" } else { "grid" }, y);
        chart.label(y, &format!("{:+.0} %", error * 100.0));
    }
    sizes.draw(&mut chart.plot, middle + HALF_HEIGHT);
    let own = report.points.iter().filter(|point| point.setting.module == module.module);
    for point in own {
        draw(&mut chart.plot, point, color, middle, sizes);
    }
    let errors = &module.errors;
    let facts = format!(
        "{} points, bias {}, mean error {}, 95 % within {}",
        errors.count,
        number::percent(errors.bias),
        number::percent(errors.mape),
        number::percent(errors.p95)
    );
    let name = module.module.name();
    let entries = [
        (format!("dot c{color}"), "between measured shapes".to_owned()),
        ("dot beyond".to_owned(), "beyond them".to_owned()),
    ];
    let plot =
        chart.finish(middle + HALF_HEIGHT + AXIS_HEIGHT, &format!("Errors of {name} over tokens"), &facts);
    format!(
        "<section><h2>{name}</h2>\n<p>{}. A dot is one measured point; errors beyond 50 % sit on the edge.</p>\n{}{plot}</section>\n",
        escape(&facts),
        legend(&entries)
    )
}

fn draw(plot: &mut String, point: &PointAccuracy, color: usize, middle: f64, sizes: &SizeAxis) {
    let error = point.relative_error();
    let y = middle - error.clamp(-ERROR_SHOWN_MAX, ERROR_SHOWN_MAX) / ERROR_SHOWN_MAX * HALF_HEIGHT;
    let setting = point.setting;
    let [predicted, observed] =
        [point.predicted_ns, point.observed_ns].map(|ns| number::seconds(ns as f64 / 1e9));
    let tooltip = format!(
        "{} {}, {} layers, {} x {} tokens: {predicted} predicted, {observed} observed, {:+.1} %",
        setting.part,
        setting.phase,
        setting.layers,
        setting.batch,
        setting.tokens,
        error * 100.0
    );
    // Extrapolated points of all parts share one color.
    let class = if point.is_extrapolated { "dot beyond".to_owned() } else { format!("dot c{color}") };
    svg::dot(plot, &class, sizes.x(point.size()), (y * 10.0).round() / 10.0, RADIUS, &tooltip);
}

/// Logarithmic axis of tokens along the width.
struct SizeAxis {
    first: f64,
    octaves: f64,
}

impl SizeAxis {
    fn new(points: &[PointAccuracy]) -> Self {
        let sizes = || points.iter().map(|point| point.size().max(1) as f64);
        let (least, most) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(1.0, f64::max));
        let first = if least.is_finite() { least.log2().floor() } else { 0.0 };
        Self { first, octaves: (most.log2().ceil() - first).max(1.0) }
    }

    fn x(&self, tokens: u64) -> f64 {
        MARGIN_PERCENT + ((tokens.max(1) as f64).log2() - self.first) / self.octaves * REACH_PERCENT
    }

    /// Draws a tick at every second doubling.
    fn draw(&self, out: &mut String, bottom: f64) {
        let mut octave = 0.0;
        while octave <= self.octaves {
            let tokens = 2_f64.powf(self.first + octave) as u64;
            let x = self.x(tokens);
            svg::upright(out, "grid", x, [TOP, bottom]);
            let spot = Spot { x, dx: 0.0, y: bottom + 14.0, anchor: Anchor::Middle };
            svg::text(out, "tick", spot, &tokens.to_string());
            octave += 2.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::Profile;

    fn report() -> AccuracyReport {
        let profile = |rows: &str| {
            let head = "# dflop-profile: 1\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n";
            Profile::parse([("p.csv", format!("{head}{rows}").as_str())]).unwrap()
        };
        let known = "llm,linear,forward,1,2,1,64,10\nllm,linear,forward,1,2,1,1024,100\n";
        let observed =
            "llm,linear,forward,1,2,1,512,50\nllm,linear,forward,1,2,1,8192,5\nllm,ends,forward,1,0,1,64,5\n";
        AccuracyReport::compare(&profile(known), &profile(observed)).unwrap()
    }

    #[test]
    fn every_point_is_a_dot_and_what_was_not_compared_is_said() {
        let page = render_accuracy("a & b", &[("profile".into(), "<p>".into())], &report());
        assert_eq!(page.matches("<circle").count(), 2);
        assert!(page.contains("a &amp; b") && page.contains("&lt;p&gt;") && page.contains("dot beyond"));
        assert!(page.contains("1 points not compared") && page.contains(">8192</text>"), "{page}");
        assert!(!page.contains("NaN") && !page.contains("inf") && page.ends_with("</html>\n"));
    }

    #[test]
    fn nothing_is_fetched_and_nothing_runs() {
        let page = render_accuracy("t", &[], &report());
        for word in ["http", "//", "src=", "href=", "@import", "javascript", "<script"] {
            assert!(!page.contains(word), "{word}");
        }
    }
}
