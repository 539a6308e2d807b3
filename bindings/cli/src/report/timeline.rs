//! Draws the passes of every stage in one step: a Gantt chart per strategy, all on one time axis.

use dflop_balancer::Event;

use super::axis::Axis;
use super::chart::{AXIS_HEIGHT, Chart, color, legend};
use super::svg::{self, Anchor, Spot};
use super::{RankTimeline, Report, StrategyView, number};

/// Target height of all rows of a chart together in pixels, within the bounds of a row.
const ROWS_HEIGHT: f64 = 480.0;
const ROW_HEIGHT_MIN: f64 = 9.0;
const ROW_HEIGHT_MAX: f64 = 22.0;
/// Space above the first row in pixels, for the length of the step.
const TOP: f64 = 22.0;
/// Space between ranks, in pixels.
const RANK_GAP: f64 = 7.0;
/// Minimum width of a plot on a desktop and on a phone, in pixels.
const PLOT_WIDTH: f64 = 800.0;
const PLOT_WIDTH_PHONE: f64 = 240.0;
/// Width of a digit, and the margin of a number, in pixels.
const DIGIT_WIDTH: f64 = 6.5;
const NUMBER_MARGIN: f64 = 4.0;
const NANOSECONDS: f64 = 1e9;

/// Draws the timelines of all strategies that have one; empty if none has.
pub(super) fn section(report: &Report) -> String {
    let ranks = report.strategies.iter().flat_map(|strategy| &strategy.timeline);
    let axis = Axis::new(ranks.map(|rank| to_seconds(rank.makespan_ns)), 99.6);
    if axis.is_empty() {
        return String::new();
    }
    let mut out = String::from(
        "<section><h2>One step, stage by stage</h2>\n<p>Every row is a pipeline stage; a number is that of the \
         microbatch. The step ends when its slowest rank does, at the solid line; a dotted line \
         ends any other rank. All charts share one time axis.</p>\n",
    );
    out.push_str(&legend(&legend_entries(report)));
    for strategy in report.strategies.iter().filter(|strategy| !strategy.timeline.is_empty()) {
        out.push_str(&chart(strategy, &report.modules, &axis));
    }
    out.push_str("</section>\n");
    out
}

fn legend_entries(report: &Report) -> Vec<(String, String)> {
    let mut entries = Vec::new();
    for (module, name) in report.modules.iter().enumerate() {
        entries.push((format!("f {}", color(module)), format!("{name} forward")));
        entries.push((format!("b {}", color(module)), format!("{name} backward")));
    }
    entries.push(("idle".to_owned(), "idle".to_owned()));
    entries
}

fn chart(strategy: &StrategyView, modules: &[String], axis: &Axis) -> String {
    let rows: usize = strategy.timeline.iter().map(|rank| rank.stages.len()).sum();
    let row_height = (ROWS_HEIGHT / rows.max(1) as f64).floor().clamp(ROW_HEIGHT_MIN, ROW_HEIGHT_MAX);
    let step_ns = strategy.timeline.iter().map(|rank| rank.makespan_ns).max().unwrap_or_default();
    let gaps = RANK_GAP * (strategy.timeline.len() - 1) as f64;
    let bottom = TOP + rows as f64 * row_height + gaps;
    let mut chart = Chart::default();
    axis.draw(&mut chart.plot, [TOP, bottom + 4.0]);
    let mut top = TOP;
    for rank in &strategy.timeline {
        draw_rank(&mut chart, rank, &Rows { top, row_height, step_ns, modules, axis });
        top += rank.stages.len() as f64 * row_height + RANK_GAP;
    }
    draw_step_end(&mut chart.plot, axis, to_seconds(step_ns), bottom);
    let idle = number::percent(strategy.bubble_fraction);
    let length = number::seconds(to_seconds(step_ns));
    let title = format!("Timeline, {}", strategy.name);
    let description = format!("{rows} stages; the shown step takes {length}.");
    format!(
        "<h3>{} <small>this step {length}, idle in all steps {idle}</small></h3>\n{}",
        svg::escape(&strategy.name),
        chart.finish(bottom + AXIS_HEIGHT, &title, &description)
    )
}

/// Position and scale of the rows of a rank.
struct Rows<'a> {
    top: f64,
    row_height: f64,
    step_ns: u64,
    modules: &'a [String],
    axis: &'a Axis,
}

fn draw_rank(chart: &mut Chart, rank: &RankTimeline, rows: &Rows<'_>) {
    let row_ys = |stage: usize| {
        let top = rows.top + stage as f64 * rows.row_height;
        [top + 1.0, top + rows.row_height - 1.0]
    };
    for (stage, label) in rank.stages.iter().enumerate() {
        let ys = row_ys(stage);
        chart.label(f64::midpoint(ys[0], ys[1]), label);
        svg::rect(&mut chart.plot, "idle", [0.0, rows.axis.x(to_seconds(rows.step_ns))], ys, "");
    }
    for event in &rank.events {
        let module = rank.stages.get(event.rank).map_or(0, |label| find_module(label, rows.modules));
        draw_event(&mut chart.plot, event, module, row_ys(event.rank), rows.axis);
    }
    let x = rows.axis.x(to_seconds(rank.makespan_ns));
    let bottom = rows.top + rank.stages.len() as f64 * rows.row_height;
    svg::upright(&mut chart.plot, "rank-end", x, [rows.top, bottom]);
}

/// Returns the module whose name is one of the label's words; the first if none is.
fn find_module(label: &str, modules: &[String]) -> usize {
    let names = |module: &String| label.split_whitespace().any(|word| word == module);
    modules.iter().position(names).unwrap_or(0)
}

fn draw_event(plot: &mut String, event: &Event, module: usize, ys: [f64; 2], axis: &Axis) {
    let Event { microbatch, start_ns, end_ns, .. } = *event;
    let xs = [axis.x(to_seconds(start_ns)), axis.x(to_seconds(end_ns))];
    let (shade, pass) = (if event.kind.is_backward() { "b" } else { "f" }, event.kind);
    let length = number::seconds(to_seconds(end_ns - start_ns));
    let begin = number::seconds(to_seconds(start_ns));
    let tooltip = format!("microbatch {microbatch} {pass}: {length} from {begin}");
    svg::rect(plot, &format!("{shade} {}", color(module)), xs, ys, &tooltip);
    let name = microbatch.to_string();
    if let Some(class) = number_class(&name, xs[1] - xs[0], ys[1] - ys[0], shade) {
        let spot = Spot {
            x: f64::midpoint(xs[0], xs[1]),
            dx: 0.0,
            y: f64::midpoint(ys[0], ys[1]) + 3.5,
            anchor: Anchor::Middle,
        };
        svg::text(plot, &class, spot, &name);
    }
}

/// Returns the class of a number inside a bar, by the space for it: none, wide screens only, or always.
fn number_class(number: &str, width_percent: f64, height: f64, shade: &str) -> Option<String> {
    let needed = number.len() as f64 * DIGIT_WIDTH + NUMBER_MARGIN;
    let fits = |plot_width: f64| width_percent / 100.0 * plot_width >= needed && height >= 11.0;
    if fits(PLOT_WIDTH_PHONE) {
        Some(format!("n{shade}"))
    } else {
        fits(PLOT_WIDTH).then(|| format!("n{shade} wide"))
    }
}

/// Marks the end of the step, with its time on the side that has room.
fn draw_step_end(plot: &mut String, axis: &Axis, seconds: f64, bottom: f64) {
    let x = axis.x(seconds);
    svg::upright(plot, "step-end", x, [4.0, bottom + 4.0]);
    let (dx, anchor) = if x > 50.0 { (-5.0, Anchor::End) } else { (5.0, Anchor::Start) };
    svg::text(plot, "end-label", Spot { x, dx, y: 14.0, anchor }, &number::seconds(seconds));
}

fn to_seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / NANOSECONDS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_shown_where_it_fits() {
        assert_eq!(number_class("7", 20.0, 20.0, "f").unwrap(), "nf");
        assert_eq!(number_class("7", 2.0, 20.0, "b").unwrap(), "nb wide");
        assert_eq!(number_class("7", 0.2, 20.0, "f"), None);
        assert_eq!(number_class("7", 20.0, 8.0, "f"), None);
    }

    #[test]
    fn a_stage_has_the_color_of_the_module_it_names() {
        let modules = ["vision", "llm"].map(str::to_owned);
        assert_eq!(find_module("rank 0 llm 1", &modules), 1);
        assert_eq!(find_module("rank 0", &modules), 0);
    }
}
