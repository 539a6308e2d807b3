//! Renders simulated steps as one self-contained HTML page: no network, no script, light and dark.
//!
//! [`render`] is a pure function from a [`Report`] to text. All charts are inline SVG. Positions along the
//! time axis are percentages, so that charts fill a phone as well as a desktop while the text keeps its size.

mod accuracy;
mod axis;
mod chart;
mod loads;
mod number;
mod page;
mod spread;
mod svg;
mod timeline;

use dflop_balancer::Event;

pub(crate) use accuracy::render_accuracy;
pub(crate) use page::render;

/// Contents of the page.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    /// Heading of the page.
    pub(crate) title: String,
    /// Labels and values with their units: the model, the device rate, the cluster, the dataset and so on.
    pub(crate) summary: Vec<(String, String)>,
    /// Names of the modules, in the order of all loads.
    pub(crate) modules: Vec<String>,
    /// Strategies, data-blind first, balanced last; the speed-up compares the last with the first.
    pub(crate) strategies: Vec<StrategyView>,
    /// Notes for the reader, a paragraph each.
    pub(crate) notes: Vec<String>,
}

/// Results of one strategy. An empty list has no chart; the strategy is still in the table.
#[derive(Debug, Clone)]
pub(crate) struct StrategyView {
    /// Name, such as `data-blind`.
    pub(crate) name: String,
    /// Time of a step.
    pub(crate) step_seconds: f64,
    /// Fraction of the stages' time that they are idle, in `0..=1`.
    pub(crate) bubble_fraction: f64,
    /// Timeline of one step, per DP rank.
    pub(crate) timeline: Vec<RankTimeline>,
    /// Total seconds, `[rank][module]`.
    pub(crate) rank_load_seconds: Vec<Vec<f64>>,
    /// Seconds, `[rank][microbatch][module]`.
    pub(crate) microbatch_seconds: Vec<Vec<Vec<f64>>>,
}

/// Timeline of the stages of one DP rank in one step.
#[derive(Debug, Clone)]
pub(crate) struct RankTimeline {
    /// Labels of the stages, such as `rank 0 vision 0`; the module's name among the words selects the color.
    pub(crate) stages: Vec<String>,
    /// All passes; `stage` is an index into `stages`.
    pub(crate) events: Vec<Event>,
    /// End of this rank's last pass.
    pub(crate) makespan_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_balancer::schedule::PassKind;

    fn strategy(name: &str, makespan_ns: u64) -> StrategyView {
        let event =
            |kind, start_ns, end_ns| Event { rank: 0, stage: 0, microbatch: 0, kind, start_ns, end_ns };
        let forward = event(PassKind::Forward, 0, makespan_ns / 3);
        let events = vec![forward, event(PassKind::Backward, makespan_ns / 3, makespan_ns)];
        StrategyView {
            name: name.to_owned(),
            step_seconds: makespan_ns as f64 / 1e9,
            bubble_fraction: 0.25,
            timeline: vec![RankTimeline { stages: vec!["rank 0 llm 0".to_owned()], events, makespan_ns }],
            rank_load_seconds: vec![vec![0.1, 2.0]],
            microbatch_seconds: vec![vec![vec![0.1, 2.0]]],
        }
    }

    fn report() -> Report {
        Report {
            title: "a <b> & \"c\"".to_owned(),
            summary: vec![("model".to_owned(), "<script>alert('x')</script>".to_owned())],
            modules: vec!["vision".to_owned(), "llm".to_owned()],
            strategies: vec![
                strategy("data-blind", 3_000_000_000),
                strategy("lpt <1969>", 2_500_000_000),
                strategy("balanced", 2_000_000_000),
            ],
            notes: vec!["1 < 2".to_owned()],
        }
    }

    #[test]
    fn all_text_is_escaped() {
        let page = render(&report());
        assert!(page.contains("a &lt;b&gt; &amp; &quot;c&quot;"));
        assert!(page.contains("1 &lt; 2") && page.contains("lpt &lt;1969&gt;"));
        assert!(!page.contains("<script") && !page.contains("<b>"));
    }

    #[test]
    fn every_strategy_and_the_speedup_are_there_and_said_to_be_simulated() {
        let page = render(&report());
        for name in ["data-blind", "lpt", "balanced"] {
            assert!(page.contains(name));
        }
        assert!(page.contains("1.50×"));
        assert!(page.to_lowercase().contains("simulated"));
    }

    #[test]
    fn nothing_is_fetched_and_nothing_runs() {
        let page = render(&report());
        for word in ["http", "//", "src=", "href=", "@import", "javascript"] {
            assert!(!page.contains(word), "{word}");
        }
    }

    #[test]
    fn what_is_missing_or_zero_leaves_no_trace() {
        let mut report = report();
        report.strategies.truncate(1);
        let only = &mut report.strategies[0];
        only.timeline.clear();
        only.rank_load_seconds.clear();
        only.microbatch_seconds.clear();
        only.step_seconds = 0.0;
        let page = render(&report);
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
        assert!(page.contains("data-blind") && !page.contains("class=\"plot\""));
        report.strategies.clear();
        assert!(render(&report).contains("</html>"));
    }
}
