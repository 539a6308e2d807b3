//! Draws the spread of microbatch times: a dot each, one row per module and strategy, all on one scale.

use super::axis::Axis;
use super::chart::{AXIS_HEIGHT, Chart, color};
use super::svg;
use super::{Report, StrategyView, number};

const ROW_HEIGHT: f64 = 22.0;
const MODULE_GAP: f64 = 10.0;
const TOP: f64 = 4.0;
const RADIUS: f64 = 4.5;

/// Draws the microbatches of all strategies that have any; empty if none has.
pub(super) fn section(report: &Report) -> String {
    let shown: Vec<&StrategyView> =
        report.strategies.iter().filter(|strategy| !strategy.microbatch_seconds.is_empty()).collect();
    let times = shown.iter().flat_map(|strategy| strategy.microbatch_seconds.iter().flatten().flatten());
    let axis = Axis::new(times.copied(), 98.0);
    if axis.is_empty() {
        return String::new();
    }
    let module_height = shown.len() as f64 * ROW_HEIGHT + MODULE_GAP;
    let bottom = TOP + report.modules.len() as f64 * module_height - MODULE_GAP;
    let mut chart = Chart::default();
    axis.draw(&mut chart.plot, [0.0, bottom + 4.0]);
    let mut out = String::from(
        "<section><h2>Microbatches</h2>\n<p>A dot is the time of one microbatch in one module, all its stages \
         together. Dots far to the right are what a pipeline stalls on.</p>\n",
    );
    for (module, name) in report.modules.iter().enumerate() {
        for (row, strategy) in shown.iter().enumerate() {
            let y = TOP + module as f64 * module_height + (row as f64 + 0.5) * ROW_HEIGHT;
            chart.label(y, &format!("{name}, {}", strategy.name));
            draw_dots(&mut chart.plot, strategy, module, y, &axis);
        }
    }
    let names: Vec<&str> = shown.iter().map(|strategy| strategy.name.as_str()).collect();
    let description = format!("Times of all microbatches per module, for {}.", names.join(", "));
    out.push_str(&chart.finish(bottom + AXIS_HEIGHT, "Times of microbatches", &description));
    out.push_str("</section>\n");
    out
}

fn draw_dots(plot: &mut String, strategy: &StrategyView, module: usize, y: f64, axis: &Axis) {
    for (rank, microbatches) in strategy.microbatch_seconds.iter().enumerate() {
        for (microbatch, times) in microbatches.iter().enumerate() {
            let Some(&seconds) = times.get(module) else { continue };
            let tooltip = format!("rank {rank} microbatch {microbatch}: {}", number::seconds(seconds));
            svg::dot(plot, &format!("dot {}", color(module)), axis.x(seconds), y, RADIUS, &tooltip);
        }
    }
}
