//! User-defined stage: a trained low-rank adapter before frozen layers.
//!
//! `y = layers(x + x Dᵀ Uᵀ)`, with `D: [rank, hidden]` and `U: [hidden, rank]`. The layers pass gradients on,
//! but have none and are in no checkpoint.
//!
//! # Source
//! Hu et al.: "`LoRA`: Low-Rank Adaptation of Large Language Models", 2021, arXiv:2106.09685.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::{Device, Tensor};
use dflop_models::weights::{Init, ParameterId, WeightSource};
use dflop_models::{
    BUCKET_ELEMENTS, BlockOutput, BlockStage, Declaration, Error, FrozenModules, MicrobatchContext,
    ModelConfig, Parameters, Result, Stage, StageOptions, StageRange,
};

/// Low-rank adapter before the frozen layers in an LLM range.
pub(crate) struct Adapter<D: Device> {
    layers: BlockStage<D>,
    parameters: Parameters<D>,
    down: ParameterId,
    up: ParameterId,
    hidden: usize,
    rank: usize,
    /// Input `[rows, hidden]` and `x Dᵀ: [rows, rank]`, by microbatch.
    saved: BTreeMap<usize, [Tensor<D>; 2]>,
    /// Saved tensors with the gradients of `x + x Dᵀ Uᵀ` and of `x Dᵀ`.
    pending: BTreeMap<usize, [Tensor<D>; 4]>,
}

impl<D: Device> Adapter<D> {
    /// Creates a stage with the layers in a range, and an adapter with this rank.
    pub(crate) fn new(
        device: &D,
        model: &ModelConfig,
        range: &StageRange,
        rank: usize,
        source: &dyn WeightSource,
    ) -> Result<Self> {
        let frozen = FrozenModules { is_llm_frozen: true, ..FrozenModules::default() };
        let name = format!("adapter of layers {}..{}", range.layers.start, range.layers.end);
        // these options state that the input is trained, so that frozen layers also have a backward
        let options = StageOptions::new(name.as_str());
        let layers =
            BlockStage::new(device.clone(), options, model.stage_blocks(range, frozen, None)?, source)?;
        let hidden = model.llm.hidden();
        let mut declaration = Declaration::default();
        let prefix = format!("adapter.{}", range.layers.start);
        let down = declaration.add(format!("{prefix}.down.weight"), &[rank, hidden], Init::Normal(0.1));
        let up = declaration.add(format!("{prefix}.up.weight"), &[hidden, rank], Init::Normal(0.1));
        let parameters = Parameters::new(device, declaration.into_specs(), source, BUCKET_ELEMENTS)?;
        let (saved, pending) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { layers, parameters, down, up, hidden, rank, saved, pending })
    }

    fn order(&self, microbatch: usize, problem: &'static str) -> Error {
        Error::Order { stage: self.name().to_owned(), microbatch, problem }
    }
}

impl<D: Device> Stage<D> for Adapter<D> {
    fn name(&self) -> &str {
        self.layers.name()
    }

    fn device(&self) -> &D {
        self.layers.device()
    }

    fn parameters(&self) -> &Parameters<D> {
        &self.parameters
    }

    fn parameters_mut(&mut self) -> &mut Parameters<D> {
        &mut self.parameters
    }

    fn forward(
        &mut self,
        microbatch: usize,
        context: Arc<MicrobatchContext<D>>,
        input: Option<Tensor<D>>,
    ) -> Result<BlockOutput<D>> {
        let problem = "is missing, an adapter is no first stage".to_owned();
        let x = input.ok_or(Error::Input { input: "rows of the stage before", problem })?;
        let (rows, device) = (context.layers.rows, self.device());
        let (down, up) = (self.parameters.value(self.down), self.parameters.value(self.up));
        let mut low = device.alloc(rows * self.rank)?;
        product(device, [rows, self.rank, self.hidden], by_row(&x), transposed(down), false, &mut low)?;
        let mut adapted = device.copy(&x)?;
        product(device, [rows, self.hidden, self.rank], by_row(&low), transposed(up), true, &mut adapted)?;
        let output = self.layers.forward(microbatch, context, Some(adapted))?;
        self.saved.insert(microbatch, [x, low]);
        Ok(output)
    }

    fn backward_input(
        &mut self,
        microbatch: usize,
        gradient: Option<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>> {
        let d_adapted = self.layers.backward_input(microbatch, gradient)?;
        let saved = self.saved.remove(&microbatch).zip(d_adapted);
        let Some(([x, low], d_adapted)) = saved else {
            return Err(self.order(microbatch, "is not in flight"));
        };
        let (rows, device) = (x.len() / self.hidden, self.device());
        let (down, up) = (self.parameters.value(self.down), self.parameters.value(self.up));
        let mut d_low = device.alloc(rows * self.rank)?;
        product(device, [rows, self.rank, self.hidden], by_row(&d_adapted), by_row(up), false, &mut d_low)?;
        let mut dx = device.copy(&d_adapted)?;
        product(device, [rows, self.hidden, self.rank], by_row(&d_low), by_row(down), true, &mut dx)?;
        self.pending.insert(microbatch, [x, low, d_adapted, d_low]);
        Ok(Some(dx))
    }

    fn backward_weight(&mut self, microbatch: usize) -> Result<()> {
        self.layers.backward_weight(microbatch)?;
        let Some([x, low, d_adapted, d_low]) = self.pending.remove(&microbatch) else {
            return Err(self.order(microbatch, "has no backward pass of its input"));
        };
        let (rows, device) = (x.len() / self.hidden, self.layers.device());
        let (d_down, d_up) = self.parameters.gradients_mut(self.down, self.up);
        if let (Some(d_down), Some(d_up)) = (d_down, d_up) {
            product(device, [self.rank, self.hidden, rows], transposed(&d_low), by_row(&x), true, d_down)?;
            product(
                device,
                [self.hidden, self.rank, rows],
                transposed(&d_adapted),
                by_row(&low),
                true,
                d_up,
            )?;
        }
        Ok(())
    }

    fn forget(&mut self) {
        self.layers.forget();
        self.saved.clear();
        self.pending.clear();
    }
}

/// Product factor, and whether it is stored transposed.
type Factor<'a, D> = (&'a Tensor<D>, bool);

fn by_row<D: Device>(factor: &Tensor<D>) -> Factor<'_, D> {
    (factor, false)
}

fn transposed<D: Device>(factor: &Tensor<D>) -> Factor<'_, D> {
    (factor, true)
}

/// Computes `c = a b`, or `c += a b`; sizes are rows, columns and inner dimension.
fn product<D: Device>(
    device: &D,
    [rows, columns, inner]: [usize; 3],
    (a, is_a_transposed): Factor<'_, D>,
    (b, is_b_transposed): Factor<'_, D>,
    is_added: bool,
    c: &mut Tensor<D>,
) -> Result<()> {
    let layout = |of_rows: usize, of_columns: usize, is_transposed: bool| {
        if is_transposed { MatrixLayout::rows(of_rows).transposed() } else { MatrixLayout::rows(of_columns) }
    };
    let (a, b) = ((a, layout(rows, inner, is_a_transposed)), (b, layout(inner, columns, is_b_transposed)));
    let target = (c, MatrixLayout::rows(columns));
    Ok(device.gemm(GemmShape { rows, columns, inner }, a, b, is_added, target, Epilogue::None)?)
}
