//! Predicts the time that a sample takes in a context-parallel group, rank by rank.
//!
//! Every rank runs the LLM over a zigzag slice ([`ZigzagSlices`]). Linear work follows the tokens in the
//! slice, attention the pairs in its rows. Keys and values come from the other ranks, in every layer and pass
//! over the layers, and their gradients go back:
//!
//! - *ring*: one message in every ring step but the last, while the attention of the step is computed; the
//!   rank waits for what takes longer than that. Layers with windows have little to compute in a step, so
//!   their messages count in full.
//! - *all-gather*: all keys and values before the attention, and their gradients after it, hidden by nothing.
//!
//! Keys and values count as wide as the attention reads them, also for latent attention. Recurrent layers
//! count as linear work, without the messages for their state.
//!
//! # Source
//! Liu et al., "Ring Attention", 2023, arXiv:2310.01889, section 3: messages beside the attention of the
//! previous block. Grattafiori et al., "The Llama 3 Herd of Models", 2024, arXiv:2407.21783, section 3.3.2:
//! all-gather of keys and values.

use super::ModuleWorkload;
use super::cost_model::{CostModel, TimeSource};
use super::device::DeviceLink;
use super::predicted_time::whole_ns;
use crate::Module;
use crate::error::{Error, Result};
use crate::flops::{SliceFlops, ZigzagSlices};

/// Largest context-parallel group that [`CostModel::predict_slices`] accepts.
const RANKS_MAX: u32 = 1 << 16;
/// Part by which the slices may exceed their sample's time, if the sample divides well.
const EXCESS_DIVISOR: u64 = 20;

/// Exchange of keys and values between the ranks of a context-parallel group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KeyExchange {
    /// Order of messages and attention.
    pub kind: KeyExchangeKind,
    /// Link between neighboring ranks; `None` if unknown, and messages take no time.
    pub link: Option<DeviceLink>,
    /// Bytes per element of keys and values.
    pub element_bytes: u32,
}

/// Order of messages and attention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum KeyExchangeKind {
    /// Keys and values pass around the group, while attention is computed over the previous ones.
    #[default]
    Ring,
    /// All keys and values are gathered before the attention.
    AllGather,
}

/// Predicted cost of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SliceCost {
    /// LLM positions in the slice.
    pub tokens: u32,
    /// Time that the slice adds to the LLM, forward and backward, in nanoseconds, without messages.
    pub llm_ns: u64,
    /// Time in which the rank waits for messages, in nanoseconds.
    pub exposed_ns: u64,
}

impl SliceCost {
    /// Returns the LLM time with exposed messages, in nanoseconds.
    #[must_use]
    pub const fn total_ns(&self) -> u64 {
        self.llm_ns.saturating_add(self.exposed_ns)
    }
}

/// What a sample's largest slice adds to ranks that may share other samples, too.
///
/// Messages of several samples go together: a group waits for the [latencies](CostModel::message_latencies)
/// once, and for the sum of `message_ns` over the samples, unless it is negative even with the latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SliceShare {
    /// LLM time with the transfers that nothing hides, in nanoseconds.
    pub ns: u64,
    /// Transfers less the attention that is computed beside them, in nanoseconds; the mean pass over the
    /// layers stands for all.
    pub message_ns: i64,
}

/// Latencies of a group's messages, in all layers and passes, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct MessageLatency {
    /// Of messages that nothing hides.
    pub exposed_ns: u64,
    /// Of messages beside attention.
    pub hidden_ns: u64,
}

impl CostModel {
    /// Predicts the slices of a sample on the ranks of a context-parallel group, in rank order.
    ///
    /// A group with one rank has the LLM time of [`CostModel::predict`]. Target tokens count as evenly
    /// spread.
    ///
    /// - `tokens`: LLM positions, media included
    /// - `ranks`: ranks in the group, at least 1
    ///
    /// # Errors
    /// [`Error::Incompatible`] if `ranks` is 0 or above 65,536.
    ///
    /// # Examples
    /// ```
    /// use dflop_costmodel::{CostModel, DevicePreset, KeyExchange, KeyExchangeKind, ModelSpec};
    ///
    /// # fn main() -> dflop_costmodel::Result<()> {
    /// let h100 = DevicePreset::named("h100")?;
    /// let model = CostModel::new(ModelSpec::preset("qwen2.5-vl-7b")?, *h100.rate());
    /// let link = h100.links().map(|links| links.nvlink);
    /// let ring = KeyExchange { kind: KeyExchangeKind::Ring, link, element_bytes: 2 };
    /// let whole = model.predict_slices(32_768, 1_000, 1, &ring)?[0].total_ns() as f64;
    /// let slices = model.predict_slices(32_768, 1_000, 4, &ring)?;
    /// assert!(slices.iter().all(|slice| (4.0 * slice.total_ns() as f64 / whole - 1.0).abs() < 0.02));
    /// # Ok(())
    /// # }
    /// ```
    pub fn predict_slices(
        &self,
        tokens: u32,
        target_tokens: u32,
        ranks: u32,
        exchange: &KeyExchange,
    ) -> Result<Vec<SliceCost>> {
        self.predict_packed_slices(&[[tokens, target_tokens]], ranks, exchange)
    }

    /// Predicts the slices of several samples that share the messages of a context-parallel group, in rank
    /// order: every message has the keys and values of all samples.
    ///
    /// - `samples`: tokens and target tokens, as for [`Self::predict_slices`]
    ///
    /// # Errors
    /// As [`Self::predict_slices`]; [`Error::TooLarge`] if the tokens do not fit into 32 bits.
    pub fn predict_packed_slices(
        &self,
        samples: &[[u32; 2]],
        ranks: u32,
        exchange: &KeyExchange,
    ) -> Result<Vec<SliceCost>> {
        self.check_ranks(ranks)?;
        let count: u64 = samples.iter().map(|[tokens, _]| u64::from(*tokens)).sum();
        u32::try_from(count).map_err(|_| Error::TooLarge { quantity: "tokens", count })?;
        if ranks == 1 {
            let llm_ns = samples.iter().map(|[tokens, targets]| self.llm_ns(*tokens, *targets));
            let llm_ns = llm_ns.fold(0, u64::saturating_add);
            return Ok(vec![SliceCost { tokens: count as u32, llm_ns, exposed_ns: 0 }]);
        }
        let transfer_ns: f64 =
            samples.iter().map(|[tokens, _]| transfer_ns(self, *tokens, ranks, exchange)).sum();
        Ok((0..ranks).map(|rank| self.packed_slice(samples, [rank, ranks], exchange, transfer_ns)).collect())
    }

    /// Predicts what a sample's largest slice adds to a group, see [`SliceShare`].
    ///
    /// - `tokens`, `target_tokens`, `ranks`: as for [`Self::predict_slices`]
    ///
    /// # Errors
    /// As [`Self::predict_slices`].
    pub fn predict_slice_share(
        &self,
        tokens: u32,
        target_tokens: u32,
        ranks: u32,
        exchange: &KeyExchange,
    ) -> Result<SliceShare> {
        if ranks <= 1 {
            let whole = self.predict_slices(tokens, target_tokens, ranks, exchange)?;
            return Ok(SliceShare { ns: whole[0].llm_ns, message_ns: 0 });
        }
        self.check_ranks(ranks)?;
        let slices = ZigzagSlices::new(tokens, ranks);
        let size = |rank: &u32| (slices.tokens(*rank), slices.squares(*rank));
        let largest = (0..ranks).rev().max_by_key(size).unwrap_or(0);
        let flops = self.llm.slice(&slices, largest, self.module_recomputation(Module::Llm));
        let (llm_ns, flop_ns) = self.slice_ns(slices, largest, target_tokens, &flops);
        let llm_ns = self.corrected_ns(Module::Llm, tokens.into(), whole_ns(llm_ns));
        let transfer = transfer_ns(self, tokens, ranks, exchange);
        let messages: u32 = flops.ring.iter().map(|pass| pass.messages).sum();
        let sent_ns = f64::from(messages) * f64::from(ranks - 1) * transfer;
        let [full, apart] = self.hiding_layers(exchange.kind);
        // Nothing is sent in the last step.
        let computed = flops.ring.iter().flat_map(|pass| &pass.steps[..pass.steps.len() - 1]);
        let hidden_ns = if full > 0.0 { computed.sum::<u128>() as f64 * flop_ns } else { 0.0 };
        let message_ns = (full * sent_ns - hidden_ns).round();
        Ok(SliceShare { ns: llm_ns.saturating_add(whole_ns(apart * sent_ns)), message_ns: message_ns as i64 })
    }

    /// Returns the largest group that divides a sample well: a power of two of ranks whose slices, with their
    /// messages, take at most a twentieth more than an equal share of the LLM time; 1 if there is none.
    ///
    /// - `tokens`, `target_tokens`: as for [`Self::predict_slices`]
    /// - `most`: largest number of ranks
    ///
    /// # Errors
    /// As [`Self::predict_slices`].
    pub fn divisible_ranks(
        &self,
        tokens: u32,
        target_tokens: u32,
        most: u32,
        exchange: &KeyExchange,
    ) -> Result<u32> {
        self.check_ranks(most)?;
        let whole_ns = self.predict_slice_share(tokens, target_tokens, 1, exchange)?.ns;
        let mut divisible = 1;
        for ranks in (1..=most.ilog2()).map(|log| 1 << log) {
            let share = self.predict_slice_share(tokens, target_tokens, ranks, exchange)?;
            let latency = self.message_latencies(ranks, exchange)?;
            let wait_ns = share.message_ns.saturating_add_unsigned(latency.hidden_ns).max(0) as u64;
            let all_ns = u128::from(share.ns + latency.exposed_ns + wait_ns) * u128::from(ranks);
            if all_ns <= u128::from(whole_ns) + u128::from(whole_ns / EXCESS_DIVISOR) {
                divisible = ranks;
            }
        }
        Ok(divisible)
    }

    /// Returns the FLOPs for a sample's slice on every rank in a context-parallel group, in rank order.
    ///
    /// # Errors
    /// As [`Self::predict_slices`].
    pub fn slice_flops(&self, tokens: u32, ranks: u32) -> Result<Vec<SliceFlops>> {
        self.check_ranks(ranks)?;
        let slices = ZigzagSlices::new(tokens, ranks);
        let recomputation = self.module_recomputation(Module::Llm);
        Ok((0..ranks).map(|rank| self.llm.slice(&slices, rank, recomputation)).collect())
    }

    fn check_ranks(&self, ranks: u32) -> Result<()> {
        if (1..=RANKS_MAX).contains(&ranks) {
            return Ok(());
        }
        let problem = format!("a context-parallel group has 1 to {RANKS_MAX} ranks, got {ranks}");
        Err(Error::Incompatible { name: self.spec.name.clone(), problem })
    }

    /// Returns the message latencies in a group, however many samples it shares.
    ///
    /// # Errors
    /// As [`Self::predict_slices`].
    pub fn message_latencies(&self, ranks: u32, exchange: &KeyExchange) -> Result<MessageLatency> {
        self.check_ranks(ranks)?;
        let Some(link) = exchange.link else { return Ok(MessageLatency::default()) };
        let passes = self.llm.slice(&ZigzagSlices::new(0, ranks), 0, self.module_recomputation(Module::Llm));
        let messages: u32 = match exchange.kind {
            KeyExchangeKind::Ring => passes.ring.len() as u32,
            KeyExchangeKind::AllGather => passes.ring.iter().map(|pass| pass.messages).sum(),
        };
        let latency_ns = 1e9 * link.latency_seconds * f64::from(messages) * f64::from(ranks - 1);
        let [full, apart] = self.hiding_layers(exchange.kind);
        Ok(MessageLatency {
            exposed_ns: whole_ns(apart * latency_ns),
            hidden_ns: whole_ns(full * latency_ns),
        })
    }

    /// Counts the layers whose attention hides messages, and all others.
    fn hiding_layers(&self, kind: KeyExchangeKind) -> [f64; 2] {
        let llm = &self.spec.llm;
        let windowed = f64::from(llm.windowed_layer_count().min(llm.layers));
        match kind {
            KeyExchangeKind::Ring => [f64::from(llm.layers) - windowed, windowed],
            KeyExchangeKind::AllGather => [0.0, f64::from(llm.layers)],
        }
    }

    /// Predicts the slices on one rank.
    fn packed_slice(
        &self,
        samples: &[[u32; 2]],
        [rank, ranks]: [u32; 2],
        exchange: &KeyExchange,
        transfer_ns: f64,
    ) -> SliceCost {
        let mut cost = SliceCost { tokens: 0, llm_ns: 0, exposed_ns: 0 };
        let mut passes: Vec<TimedPass> = Vec::new();
        for &[tokens, targets] in samples {
            let slices = ZigzagSlices::new(tokens, ranks);
            let flops = self.llm.slice(&slices, rank, self.module_recomputation(Module::Llm));
            let (llm_ns, flop_ns) = self.slice_ns(slices, rank, targets, &flops);
            let corrected_ns = self.corrected_ns(Module::Llm, tokens.into(), whole_ns(llm_ns));
            cost.llm_ns = cost.llm_ns.saturating_add(corrected_ns);
            cost.tokens += slices.tokens(rank);
            let empty = TimedPass { steps_ns: vec![0.0; ranks as usize], messages: 0.0 };
            passes.resize(flops.ring.len(), empty);
            for (timed, pass) in passes.iter_mut().zip(&flops.ring) {
                timed.messages = pass.messages.into();
                for (ns, flops) in timed.steps_ns.iter_mut().zip(&pass.steps) {
                    *ns += *flops as f64 * flop_ns;
                }
            }
        }
        let latency_ns = exchange.link.map_or(0.0, |link| 1e9 * link.latency_seconds);
        cost.exposed_ns = whole_ns(self.exposed_ns(&passes, [latency_ns, transfer_ns], exchange.kind));
        cost
    }

    /// Returns the bytes of a token's keys and values in a layer.
    fn key_bytes(&self, element_bytes: u32) -> f64 {
        let llm = &self.spec.llm;
        let width = f64::from(llm.head_dim) + f64::from(llm.value_dim());
        f64::from(llm.kv_heads) * width * f64::from(element_bytes)
    }

    /// Returns the nanoseconds of a slice without messages, and of one FLOP in the attention of layers
    /// without windows.
    fn slice_ns(&self, slices: ZigzagSlices, rank: u32, targets: u32, flops: &SliceFlops) -> (f64, f64) {
        match &self.times {
            TimeSource::Rate(rate) => {
                let all = rate.nanoseconds(Module::Llm, flops.training.total()) as f64;
                (all, 1e3 / rate.flops_per_us(Module::Llm).get() as f64)
            }
            TimeSource::Profile(timing) => {
                let own = f64::from(slices.tokens(rank));
                let targets = f64::from(targets) * own / f64::from(slices.whole_tokens().max(1));
                let linear = ModuleWorkload { tokens: own, targets, ..ModuleWorkload::from_llm(0, 0) };
                let length = slices.squares(rank) as f64 / own.max(1.0);
                let sequences = if length > 0.0 { own / length } else { 0.0 };
                let with_attention = ModuleWorkload { attention: [sequences, length], ..linear };
                let all = timing.added_ns(Module::Llm, &with_attention);
                let attention = (all - timing.added_ns(Module::Llm, &linear)).max(0.0);
                let ring: u128 = flops.ring.iter().flat_map(|pass| &pass.steps).sum();
                (all, attention / (ring as f64).max(1.0))
            }
        }
    }

    /// Returns the nanoseconds in which a rank waits for messages, in all layers and passes.
    ///
    /// - `latency`, `transfer`: nanoseconds of a message with the keys and values in one layer
    fn exposed_ns(&self, passes: &[TimedPass], [latency, transfer]: [f64; 2], kind: KeyExchangeKind) -> f64 {
        let [full, apart] = self.hiding_layers(kind);
        let mut exposed = 0.0;
        for TimedPass { steps_ns, messages } in passes {
            // Nothing is sent in the last step.
            let computed = steps_ns.split_last().map_or(&[][..], |(_, computed)| computed);
            let sends = computed.len() as f64;
            exposed += match kind {
                KeyExchangeKind::Ring => {
                    let message = latency + messages * transfer;
                    let wait = |ns: &f64| (message - ns / full.max(1.0)).max(0.0);
                    full * computed.iter().map(wait).sum::<f64>() + apart * sends * message
                }
                // Backward, keys and values are gathered again, and gradients are sent in messages of their
                // own.
                KeyExchangeKind::AllGather => apart * messages * sends * (latency + transfer),
            };
        }
        exposed
    }
}

/// Attention of a rank in a pass over the layers without windows.
#[derive(Debug, Clone)]
struct TimedPass {
    /// Nanoseconds by ring step, in all layers.
    steps_ns: Vec<f64>,
    /// Message size in multiples of the keys and values.
    messages: f64,
}

/// Returns the nanoseconds in which the longest slice's keys and values in a layer pass a link.
fn transfer_ns(model: &CostModel, tokens: u32, ranks: u32, exchange: &KeyExchange) -> f64 {
    let Some(link) = exchange.link else { return 0.0 };
    let bytes =
        f64::from(ZigzagSlices::new(tokens, ranks).tokens_max()) * model.key_bytes(exchange.element_bytes);
    1e9 * bytes / link.bytes_per_second
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flops::Recomputation;
    use crate::{DevicePreset, DeviceRate, ModelSpec, SampleShape};

    const FREE: KeyExchange = KeyExchange { kind: KeyExchangeKind::Ring, link: None, element_bytes: 2 };

    fn model(name: &str) -> CostModel {
        CostModel::new(ModelSpec::preset(name).unwrap(), DeviceRate::preset("h100").unwrap())
    }

    fn over(link: DeviceLink, kind: KeyExchangeKind) -> KeyExchange {
        KeyExchange { kind, link: Some(link), element_bytes: 2 }
    }

    #[test]
    fn one_rank_takes_the_time_of_the_whole_sample() {
        let model = model("llava-ov-qwen2.5-7b").recomputation(Recomputation::Layers);
        for tokens in [0, 1, 999, 50_000] {
            let shape = SampleShape { text_tokens: tokens, ..SampleShape::default() };
            let whole = *model.predict(&shape).unwrap().module_ns.as_slice().last().unwrap();
            let slices = model.predict_slices(tokens, 0, 1, &FREE).unwrap();
            assert_eq!(slices, [SliceCost { tokens, llm_ns: whole, exposed_ns: 0 }]);
        }
        assert!(model.predict_slices(8, 0, 0, &FREE).is_err());
    }

    #[test]
    fn slices_take_together_what_the_sample_takes() {
        let model = model("llava-ov-qwen2.5-7b");
        for ranks in [2, 4, 8] {
            let whole = model.predict_slices(10_007, 100, 1, &FREE).unwrap()[0].llm_ns;
            let slices = model.predict_slices(10_007, 100, ranks, &FREE).unwrap();
            let sum: u64 = slices.iter().map(|slice| slice.llm_ns).sum();
            // Every slice is rounded up.
            assert!(sum >= whole && sum <= whole + u64::from(ranks), "{sum} {whole}");
            assert_eq!(slices.iter().map(|slice| slice.tokens).sum::<u32>(), 10_007);
            assert!(slices.iter().all(|slice| slice.exposed_ns == 0));
        }
    }

    /// By hand: 28 layers, 4 key heads of 128, 4,000 tokens on 4 ranks, 2 bytes: 2.048 MB a message. At 1
    /// GB/s every message is longer than its attention, 4 x 3584 FLOPs per pair at 450 TFLOP/s.
    #[test]
    fn a_slow_ring_waits_for_messages_less_attention() {
        let model = model("llava-ov-qwen2.5-7b");
        let slow = DeviceLink { bytes_per_second: 1e9, latency_seconds: 1e-5 };
        let ring = model.predict_slices(4_000, 0, 4, &over(slow, KeyExchangeKind::Ring)).unwrap();
        let rate = DeviceRate::preset("h100").unwrap().flops_per_us(Module::Llm).get() as f64 * 1e6;
        let slices = ZigzagSlices::new(4_000, 4);
        for rank in 0..4 {
            let mut expected = 0.0;
            // Forward, and backward with twice the FLOPs and bytes.
            for times in [1.0, 2.0] {
                for step in 0..3 {
                    // Half the FLOPs of a pair for a square: `2 x 3584 x 2 / 2`.
                    let attention = times * 2.0 * 3584.0 * slices.ring_squares(rank, step) as f64 / rate;
                    let message = 1e-5 + times * 1000.0 * 2048.0 / 1e9;
                    assert!(message > attention);
                    expected += 28.0 * (message - attention);
                }
            }
            let found = ring[rank as usize].exposed_ns as f64 / 1e9;
            assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
        }
        let gathered = model.predict_slices(4_000, 0, 4, &over(slow, KeyExchangeKind::AllGather)).unwrap();
        let expected = 28.0 * 3.0 * 3.0 * (1e-5 + 2.048e-3);
        assert!((gathered[0].exposed_ns as f64 / 1e9 / expected - 1.0).abs() < 1e-6);
        assert_eq!(gathered[0].llm_ns, ring[0].llm_ns);
    }

    #[test]
    fn a_fast_ring_hides_its_messages_for_long_samples_only() {
        let model = model("llava-ov-qwen2.5-7b");
        let nvlink = DevicePreset::named("h100").unwrap().links().unwrap().nvlink;
        let exposed = |tokens| {
            let slices = model.predict_slices(tokens, 0, 8, &over(nvlink, KeyExchangeKind::Ring)).unwrap();
            slices.iter().map(|slice| slice.exposed_ns as f64 / slice.llm_ns as f64).fold(0.0, f64::max)
        };
        assert!(exposed(100_000) < 1e-9, "{}", exposed(100_000));
        assert!(exposed(1_000) > 0.05, "{}", exposed(1_000));
    }

    /// Windowed layers wait for every message: little is computed beside it.
    #[test]
    fn windowed_layers_expose_their_messages() {
        let model = model("llava-ov-qwen2.5-7b");
        let mut spec = model.spec().clone();
        spec.llm.windows = Some(crate::model::WindowedAttention {
            layers: crate::model::LayerSet::range(0, 14),
            tokens: 512,
            kind: crate::model::Window::Sliding,
        });
        let windowed = CostModel::new(spec, DeviceRate::preset("h100").unwrap());
        let nvlink = DevicePreset::named("h100").unwrap().links().unwrap().nvlink;
        let ring = over(nvlink, KeyExchangeKind::Ring);
        let [plain, windowed] =
            [&model, &windowed].map(|model| model.predict_slices(100_000, 0, 4, &ring).unwrap()[0]);
        let message =
            |times: f64| nvlink.latency_seconds + times * 25_000.0 * 2048.0 / nvlink.bytes_per_second;
        let expected = 14.0 * 3.0 * (message(1.0) + message(2.0));
        assert_eq!(plain.exposed_ns, 0);
        assert!((windowed.exposed_ns as f64 / 1e9 / expected - 1.0).abs() < 1e-6);
        assert!(windowed.llm_ns < plain.llm_ns);
    }

    /// Shares of samples add up to the slices of the pack: latencies once, transfers less attention summed.
    #[test]
    fn shares_add_up_to_the_pack() {
        let nvlink = DevicePreset::named("h100").unwrap().links().unwrap().nvlink;
        let slow = DeviceLink { bytes_per_second: 2e10, latency_seconds: 1e-5 };
        let packs: [&[[u32; 2]]; 4] =
            [&[[8_192, 0]], &[[2_048, 7], [512, 0]], &[[64, 0]; 20], &[[30_720, 100], [1_024, 0]]];
        for name in ["llava-ov-qwen2.5-7b", "gemma3-12b"] {
            let model = model(name).recomputation(Recomputation::Layers);
            for (link, kind) in [
                (nvlink, KeyExchangeKind::Ring),
                (slow, KeyExchangeKind::Ring),
                (slow, KeyExchangeKind::AllGather),
            ] {
                let exchange = over(link, kind);
                for (ranks, pack) in
                    [1, 2, 4, 8].into_iter().flat_map(|ranks| packs.map(|pack| (ranks, pack)))
                {
                    let exact = model.predict_packed_slices(pack, ranks, &exchange).unwrap();
                    let exact = exact.iter().map(SliceCost::total_ns).max().unwrap();
                    let shares = pack.iter().map(|[tokens, targets]| {
                        model.predict_slice_share(*tokens, *targets, ranks, &exchange).unwrap()
                    });
                    let latency = model.message_latencies(ranks, &exchange).unwrap();
                    let (ns, message_ns) =
                        shares.fold((0, 0), |(ns, sum), own| (ns + own.ns, sum + own.message_ns));
                    let waits = message_ns.saturating_add_unsigned(latency.hidden_ns).max(0) as u64;
                    let found = ns + latency.exposed_ns + waits;
                    assert!(
                        (found as f64 / exact as f64 - 1.0).abs() < 0.02,
                        "{name} {kind:?} {ranks} {pack:?}: {found} {exact}"
                    );
                    assert!(found <= exact + 30, "the mean pass: {found} {exact}");
                }
            }
        }
        assert!(model("llava-ov-qwen2.5-7b").message_latencies(0, &FREE).is_err());
        assert!(model("llava-ov-qwen2.5-7b").predict_slice_share(1, 0, 0, &FREE).is_err());
    }

    #[test]
    fn long_samples_divide_well() {
        let model = model("llava-ov-qwen2.5-7b");
        let nvlink = DevicePreset::named("h100").unwrap().links().unwrap().nvlink;
        let ring = over(nvlink, KeyExchangeKind::Ring);
        let ranks = |tokens| model.divisible_ranks(tokens, 0, 8, &ring).unwrap();
        assert_eq!((ranks(0), ranks(64), ranks(50_000)), (1, 1, 8));
        let divided: Vec<u32> = (1..300).map(|chunks| ranks(16 * chunks)).collect();
        assert!(
            divided.is_sorted() && [1, 2, 4, 8].iter().all(|ranks| divided.contains(ranks)),
            "{divided:?}"
        );
        assert_eq!(model.divisible_ranks(50_000, 0, 6, &ring).unwrap(), 4);
        assert!(model.divisible_ranks(50_000, 0, 0, &ring).is_err());
    }

    #[test]
    fn samples_in_a_pack_share_latencies() {
        let model = model("llava-ov-qwen2.5-7b");
        let late = DeviceLink { bytes_per_second: 1e15, latency_seconds: 1e-3 };
        let ring = over(late, KeyExchangeKind::AllGather);
        let one = model.predict_slices(3_000, 0, 4, &ring).unwrap();
        let pack = model.predict_packed_slices(&[[3_000, 0], [3_000, 0]], 4, &ring).unwrap();
        for (one, pack) in one.iter().zip(&pack) {
            assert_eq!((pack.tokens, pack.llm_ns), (2 * one.tokens, 2 * one.llm_ns));
            assert!((pack.exposed_ns as f64 / one.exposed_ns as f64 - 1.0).abs() < 1e-5);
        }
        assert!(model.predict_packed_slices(&[[u32::MAX, 0]; 2], 4, &ring).is_err());
        assert_eq!(model.predict_packed_slices(&[], 2, &ring).unwrap()[1].total_ns(), 0);
    }
}
