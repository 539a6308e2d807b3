//! Draws the compute time of every DP rank in each module: bars per strategy, all on one scale.

use super::axis::Axis;
use super::chart::{AXIS_HEIGHT, Chart, color, legend};
use super::svg::{self, Anchor, Spot};
use super::{Report, StrategyView, number};

const BAR_HEIGHT: f64 = 13.0;
const RANK_GAP: f64 = 9.0;
const TOP: f64 = 4.0;
/// Position of the longest bar's end in percent, which leaves room for its number, also on a phone.
const REACH_PERCENT: f64 = 78.0;

/// Draws the loads of all strategies that have any; empty if none has.
pub(super) fn section(report: &Report) -> String {
    let times = report.strategies.iter().flat_map(|strategy| &strategy.rank_load_seconds).flatten();
    let axis = Axis::new(times.copied(), REACH_PERCENT);
    if axis.is_empty() {
        return String::new();
    }
    let mut out = String::from(
        "<section><h2>Load of every rank</h2>\n<p>Predicted compute per module, all its stages and microbatches \
         together. <em>Imbalance</em> is the longest bar of a module divided by their mean; at 1, all ranks have \
         the same to do.</p>\n",
    );
    let entries: Vec<(String, String)> = report
        .modules
        .iter()
        .enumerate()
        .map(|(module, name)| (format!("b {}", color(module)), name.clone()))
        .collect();
    out.push_str(&legend(&entries));
    for strategy in report.strategies.iter().filter(|strategy| !strategy.rank_load_seconds.is_empty()) {
        out.push_str(&chart(strategy, &report.modules, &axis));
    }
    out.push_str("</section>\n");
    out
}

fn chart(strategy: &StrategyView, modules: &[String], axis: &Axis) -> String {
    let loads = &strategy.rank_load_seconds;
    let bars: usize = loads.iter().map(Vec::len).sum();
    let bottom = TOP + bars as f64 * BAR_HEIGHT + RANK_GAP * (loads.len() - 1) as f64;
    let mut chart = Chart::default();
    axis.draw(&mut chart.plot, [0.0, bottom + 4.0]);
    let mut top = TOP;
    for (rank, load) in loads.iter().enumerate() {
        chart.label(top + load.len() as f64 * BAR_HEIGHT / 2.0, &format!("rank {rank}"));
        for (module, &seconds) in load.iter().enumerate() {
            draw_bar(&mut chart.plot, module, seconds, top, axis);
            top += BAR_HEIGHT;
        }
        top += RANK_GAP;
    }
    let imbalances = imbalances(loads, modules);
    let title = format!("Load per rank and module, {}", strategy.name);
    let name = svg::escape(&strategy.name);
    let small = svg::escape(&imbalances);
    let svg = chart.finish(bottom + AXIS_HEIGHT, &title, &imbalances);
    format!("<h3>{name} <small>{small}</small></h3>\n{svg}")
}

fn draw_bar(plot: &mut String, module: usize, seconds: f64, top: f64, axis: &Axis) {
    let (x, ys) = (axis.x(seconds), [top + 1.0, top + BAR_HEIGHT - 1.0]);
    svg::rect(plot, &format!("b {}", color(module)), [0.0, x], ys, "");
    let spot = Spot { x, dx: 5.0, y: ys[1] - 1.5, anchor: Anchor::Start };
    svg::text(plot, "value", spot, &number::seconds(seconds));
}

/// Describes the imbalance of every module with a load.
fn imbalances(loads: &[Vec<f64>], modules: &[String]) -> String {
    let mut found = Vec::new();
    for (module, name) in modules.iter().enumerate() {
        let times: Vec<f64> = loads.iter().filter_map(|load| load.get(module).copied()).collect();
        let (sum, max) = (times.iter().sum::<f64>(), times.iter().copied().fold(0.0, f64::max));
        if sum > 0.0 {
            found.push(format!("{name} {:.2}", max * times.len() as f64 / sum));
        }
    }
    format!("imbalance: {}", found.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imbalance_is_the_longest_over_the_mean() {
        let modules = ["vision", "audio", "llm"].map(str::to_owned);
        let loads = [vec![1.0, 0.0, 2.0], vec![3.0, 0.0, 2.0]];
        assert_eq!(imbalances(&loads, &modules), "imbalance: vision 1.50, llm 1.00");
    }
}
