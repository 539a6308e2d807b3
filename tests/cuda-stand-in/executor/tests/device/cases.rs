//! Operations on random numbers of random shapes, for any device.

use dflop_device::ops::activation::Activation;
use dflop_device::ops::adamw::{AdamW, AdamWState, UpdateRange};
use dflop_device::ops::attention::AttentionShape;
use dflop_device::ops::bias::Columns;
use dflop_device::ops::elementwise::CopyRange;
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::ops::head_norm::HeadColumns;
use dflop_device::ops::rope::{RopeShape, RopeTable, Rotation};
use dflop_device::ops::sparse_rows::SparseRows;
use dflop_device::ops::vocab_parallel_cross_entropy::{PARTIAL, VocabularyPart};
use dflop_device::{Device, Dtype, Result, Tensor};

use crate::random::Random;

/// Operation names and results.
pub(crate) type Results = Vec<(String, Vec<f32>)>;

/// Calls the operations in a group, and collects the results.
pub(crate) struct Cases<'a, D: Device> {
    pub(crate) d: &'a D,
    pub(crate) random: Random,
    pub(crate) results: Results,
}

impl<'a, D: Device> Cases<'a, D> {
    pub(crate) fn new(d: &'a D, seed: u64) -> Self {
        Self { d, random: Random::new(seed), results: Vec::new() }
    }

    /// Random numbers in activation type.
    pub(crate) fn input(&mut self, len: usize) -> Result<Tensor<D>> {
        let values = self.random.numbers(len);
        self.d.upload(&values)
    }

    /// Random numbers in gradient type.
    pub(crate) fn gradient(&mut self, len: usize) -> Result<Tensor<D>> {
        let values = self.random.numbers(len);
        self.d.upload_as(Dtype::F32, &values)
    }

    pub(crate) fn keep(&mut self, name: &str, tensor: &Tensor<D>) -> Result<()> {
        let values = self.d.download(tensor)?;
        self.results.push((name.to_owned(), values));
        Ok(())
    }

    /// Calls an operation that changes a tensor, and keeps the new contents.
    pub(crate) fn changed(
        &mut self,
        name: &str,
        mut tensor: Tensor<D>,
        run: impl FnOnce(&D, &mut Tensor<D>) -> Result<()>,
    ) -> Result<()> {
        run(self.d, &mut tensor)?;
        self.keep(name, &tensor)
    }

    /// Element-wise operations, with lengths that are and are not multiples of 8.
    pub(crate) fn element_wise(&mut self) -> Result<()> {
        for len in [1, 8 * self.random.below(1, 200), self.random.below(1, 3000)] {
            let (x, y) = (self.input(len)?, self.input(len)?);
            self.changed("add", y, |d, y| d.add(&x, y))?;
            let y = self.gradient(len)?;
            self.changed("add to gradients", y, |d, y| d.add(&x, y))?;
            let y = self.input(len)?;
            self.changed("scale", y, |d, y| d.scale(0.37, y))?;
            let y = self.input(len)?;
            self.changed("zero", y, D::zero)?;
            for activation in
                [Activation::GeluExact, Activation::GeluTanh, Activation::GeluQuick, Activation::Silu]
            {
                let y = self.d.alloc(len)?;
                self.changed(&format!("{activation:?}"), y, |d, y| d.activate(activation, &x, y))?;
                let y = self.input(len)?;
                let name = format!("{activation:?} backward");
                self.changed(&name, y, |d, y| d.activate_backward(activation, &x, y))?;
            }
            let copy = self.d.copy(&x)?;
            self.keep("copy", &copy)?;
        }
        Ok(())
    }

    /// Operations on row columns.
    pub(crate) fn columns(&mut self) -> Result<()> {
        for width in [3, 8, 8 * self.random.below(1, 40), self.random.below(1, 300)] {
            let rows = self.random.below(1, 90);
            let columns = Columns { first: self.random.below(0, 5), stride: width + 5 };
            let (bias, wide) = (self.input(width)?, self.input(rows * columns.stride)?);
            self.changed("bias", wide, |d, y| d.bias(&bias, y, columns))?;
            let (wide, sums) = (self.input(rows * columns.stride)?, self.gradient(width)?);
            self.changed("bias backward", sums, |d, y| d.bias_backward(&wide, columns, y))?;
            let y = self.input(rows * (width + 2))?;
            let to = Columns { first: 1, stride: width + 2 };
            self.changed("copy columns", y, |d, y| d.copy_columns(&wide, columns, width, y, to))?;
            let (x, scale, y) = (self.input(rows * width)?, self.input(width)?, self.input(rows * width)?);
            self.changed("layer scale", y, |d, y| d.layer_scale(&x, &scale, y))?;
            let (dy, dx, mut d_scale) =
                (self.input(rows * width)?, self.d.alloc(rows * width)?, self.gradient(width)?);
            let run =
                |d: &D, dx: &mut Tensor<D>| d.layer_scale_backward(&dy, &x, &scale, dx, Some(&mut d_scale));
            self.changed("layer scale dx", dx, run)?;
            self.keep("layer scale d_scale", &d_scale)?;
            let y = self.input(3 * rows * width)?;
            let x = self.input(3 * rows * width)?;
            let is_added = self.random.below(0, 2) == 1;
            self.changed("transpose", y, |d, y| d.transpose(&x, rows, width, is_added, y))?;
            let (gate_up, dy) = (self.input(2 * rows * width)?, self.input(rows * width)?);
            for activation in [Activation::Silu, Activation::GeluTanh] {
                let y = self.d.alloc(rows * width)?;
                self.changed("gate", y, |d, y| d.gate(activation, &gate_up, width, y))?;
                let y = self.d.alloc(2 * rows * width)?;
                self.changed("gate backward", y, |d, y| {
                    d.gate_backward(activation, &dy, &gate_up, width, y)
                })?;
            }
        }
        Ok(())
    }

    /// Range copies and row selections.
    pub(crate) fn selections(&mut self) -> Result<()> {
        for count in [1, 3, self.random.below(5, 40)] {
            let lens: Vec<usize> = (0..count).map(|_| self.random.below(0, 700)).collect();
            let total: usize = lens.iter().sum();
            let (x, y) = (self.input(total + 9)?, self.input(total + 4)?);
            let mut first = 0;
            let ranges: Vec<CopyRange> = lens
                .iter()
                .map(|&len| {
                    first += len;
                    CopyRange { from: total + 9 - first, to: first - len + 4, len }
                })
                .collect();
            self.changed("copy ranges", y, |d, y| d.copy_ranges(&ranges, &x, y))?;
        }
        for columns in [1, self.random.below(1, 700)] {
            let (sources, targets) = (self.random.below(1, 30), self.random.below(1, 30));
            let entries = |random: &mut Random| -> Vec<(u32, f32)> {
                let count = random.below(0, 4);
                (0..count).map(|_| (random.below(0, sources) as u32, random.number())).collect()
            };
            let rows: Vec<_> = (0..targets).map(|_| entries(&mut self.random)).collect();
            let weighted = SparseRows::weighted(rows).upload(self.d)?;
            let (x, y) = (self.input(sources * columns)?, self.input(targets * columns)?);
            self.changed("weighted rows", y, |d, y| d.gather_scatter(&weighted.forward, columns, &x, y))?;
            let (dy, dx) = (self.input(targets * columns)?, self.gradient(sources * columns)?);
            let backward = &weighted.backward;
            self.changed("weighted rows backward", dx, |d, y| d.gather_scatter(backward, columns, &dy, y))?;
            let selected: Vec<Option<u32>> = (0..targets)
                .map(|_| Some(self.random.below(0, 2 * sources) as u32).filter(|&row| row < sources as u32))
                .collect();
            let gather = SparseRows::gather(selected).upload(self.d)?;
            let y = self.d.zeros(targets * columns)?;
            self.changed("selected rows", y, |d, y| d.gather_scatter(&gather.forward, columns, &x, y))?;
        }
        Ok(())
    }

    /// Norms over narrow rows, over rows that a block keeps in registers, and over wider rows.
    pub(crate) fn norms(&mut self) -> Result<()> {
        for columns in [4, 64, 8 * self.random.below(1, 300), self.random.below(2, 900)] {
            let rows = self.random.below(1, 70);
            self.norms_with_size(rows, columns)?;
        }
        for (rows, columns) in [(5, 8192), (3, 8200), (37, 2049)] {
            self.norms_with_size(rows, columns)?;
        }
        Ok(())
    }

    fn norms_with_size(&mut self, rows: usize, columns: usize) -> Result<()> {
        let (x, dy) = (self.input(rows * columns)?, self.input(rows * columns)?);
        let (weight, bias) = (self.input(columns)?, self.input(columns)?);
        let (mut inverse, mut statistics) =
            (self.d.alloc_as(Dtype::F32, rows)?, self.d.alloc_as(Dtype::F32, 2 * rows)?);
        let y = self.d.alloc(rows * columns)?;
        self.changed("rms norm", y, |d, y| d.rms_norm(&x, (&weight, 1.0), 1e-5, y, &mut inverse))?;
        self.keep("rms norm statistics", &inverse)?;
        let y = self.d.alloc(rows * columns)?;
        let parameters = (&weight, &bias);
        self.changed("layer norm", y, |d, y| d.layer_norm(&x, parameters, 1e-5, y, &mut statistics))?;
        self.keep("layer norm statistics", &statistics)?;
        // all gradients together, and each alone; some have a different type
        for (has_dx, has_parameters) in [(true, true), (true, false), (false, true)] {
            let len = rows * columns;
            let dx = if has_parameters { self.input(len)? } else { self.gradient(len)? };
            let mut d_weight = self.gradient(columns)?;
            let mut d_bias = if has_dx { self.gradient(columns)? } else { self.input(columns)? };
            let run = |d: &D, dx: &mut Tensor<D>| {
                let (dx, d_weight) = (has_dx.then_some(dx), has_parameters.then_some(&mut d_weight));
                d.rms_norm_backward(&dy, &x, (&weight, 1.0), &inverse, dx, d_weight)
            };
            self.changed("rms norm dx", dx, run)?;
            self.keep("rms norm d_weight", &d_weight)?;
            let dx = self.input(rows * columns)?;
            let run = |d: &D, dx: &mut Tensor<D>| {
                let parameters = has_parameters.then_some((&mut d_weight, &mut d_bias));
                d.layer_norm_backward(&dy, &x, &weight, &statistics, has_dx.then_some(dx), parameters)
            };
            self.changed("layer norm dx", dx, run)?;
            self.keep("layer norm d_weight", &d_weight)?;
            self.keep("layer norm d_bias", &d_bias)?;
        }
        Ok(())
    }

    /// Head norms, with and without a weight.
    pub(crate) fn head_norms(&mut self) -> Result<()> {
        let shapes = [(1, false), (64, false), (72, true), (128, true), (128, false), (256, true)];
        let random = (self.random.below(2, 300), false);
        for (head_dim, is_aligned) in shapes.into_iter().chain([random, (139, false), (520, true)]) {
            let (rows, count) = (self.random.below(1, 50), self.random.below(1, 6));
            let (first, end) = if is_aligned { (8, 16) } else { (self.random.below(0, 5), 7) };
            let heads = HeadColumns { first, heads: count, head_dim, stride: first + count * head_dim + end };
            let (x, weight) = (self.input(rows * heads.stride)?, self.input(head_dim)?);
            let mut inverse = self.d.alloc_as(Dtype::F32, rows * count)?;
            for weight in [Some(&weight), None] {
                let y = self.d.copy(&x)?;
                self.changed("head norm", y, |d, y| {
                    d.head_norm(heads, (weight, 1.0), 1e-5, y, &mut inverse)
                })?;
                self.keep("head norm inverses", &inverse)?;
                let (dx, mut d_weight) = (self.input(rows * heads.stride)?, self.gradient(head_dim)?);
                let d_weight_if = weight.is_some().then_some(&mut d_weight);
                self.changed("head norm dx", dx, |d, dx| {
                    d.head_norm_backward(heads, (weight, 1.0), (&x, &inverse), dx, d_weight_if)
                })?;
                self.keep("head norm d_weight", &d_weight)?;
            }
        }
        Ok(())
    }

    /// Attention sinks, for sums far below and far above the sinks.
    pub(crate) fn sinks(&mut self) -> Result<()> {
        for head_dim in [1, 64, self.random.below(2, 200)] {
            let heads = self.random.below(1, 12);
            let shape = AttentionShape { heads, kv_heads: 1, head_dim, scale: 1.0, is_causal: true };
            let rows = self.random.below(1, 90);
            let (sinks, d_output) = (self.input(heads)?, self.input(rows * shape.output())?);
            let (output, mut log_sums) = (self.input(rows * shape.output())?, self.gradient(rows * heads)?);
            self.d.scale(20.0, &mut log_sums)?;
            let mut with_sinks = self.d.copy(&output)?;
            self.d.attention_sinks(&shape, &sinks, &mut with_sinks, &mut log_sums)?;
            self.keep("output with sinks", &with_sinks)?;
            self.keep("sums with sinks", &log_sums)?;
            let d_sinks = self.gradient(heads)?;
            let saved = (&output, &log_sums);
            self.changed("gradient of sinks", d_sinks, |d, d_sinks| {
                d.attention_sinks_backward(&shape, &sinks, saved, &d_output, d_sinks)
            })?;
        }
        Ok(())
    }

    pub(crate) fn rotations(&mut self) -> Result<()> {
        for pairs in [1, 4, self.random.below(1, 64)] {
            let (tokens, axes) = (self.random.below(1, 40), self.random.below(1, 4));
            let frequencies: Vec<f32> = (0..pairs).map(|_| self.random.number().abs()).collect();
            let of_pairs = (0..pairs).map(|_| self.random.below(0, axes) as u8).collect();
            let table = RopeTable::new(frequencies, of_pairs);
            let positions: Vec<u32> = (0..axes * tokens).map(|_| self.random.below(0, 6000) as u32).collect();
            let positions = self.d.upload_indices(&positions)?;
            let (cos, sin) = self.d.rope_angles(&table, &positions, tokens)?;
            self.keep("rope cosines", &cos)?;
            self.keep("rope sines", &sin)?;
            for (rotation, is_interleaved, plain) in [
                (Rotation::Forward, false, 0),
                (Rotation::Backward, false, 3),
                (Rotation::Forward, true, 2),
                (Rotation::Backward, true, 0),
            ] {
                let (rotated, head_dim) = (2 * pairs, 2 * pairs + plain);
                let stride = 3 * head_dim + 2 * pairs + 1;
                let shape = RopeShape { heads: 3, head_dim, rotated, is_interleaved, stride };
                let x = self.input(tokens * stride)?;
                self.changed("rope", x, |d, x| d.rope(rotation, shape, (&cos, &sin), x))?;
            }
        }
        Ok(())
    }

    /// Products in all layouts, with all epilogues.
    pub(crate) fn products(&mut self) -> Result<()> {
        for case in 0..12 {
            let mut size = || if case < 4 { 8 * self.random.below(1, 9) } else { self.random.below(1, 60) };
            let shape = GemmShape { rows: size(), columns: size(), inner: size() };
            let GemmShape { rows, columns, inner } = shape;
            let layout = |is_transposed: bool, rows: usize, columns: usize| {
                let plain = MatrixLayout::rows(if is_transposed { rows } else { columns });
                if is_transposed { plain.transposed() } else { plain }
            };
            let (a, b) = (self.input(rows * inner)?, self.input(inner * columns)?);
            let a = (&a, layout(case & 1 == 1, rows, inner));
            let b = (&b, layout(case & 2 == 2, inner, columns));
            let plain = MatrixLayout::rows(columns);
            let wide = MatrixLayout::rows(columns + 3).at(2);
            let c = self.input(rows * (columns + 3) + 2)?;
            self.changed("gemm", c, |d, c| d.gemm(shape, a, b, false, (c, wide), Epilogue::None))?;
            let c = self.input(rows * columns)?;
            self.changed("gemm added", c, |d, c| d.gemm(shape, a, b, true, (c, plain), Epilogue::None))?;
            let c = self.gradient(rows * columns)?;
            self.changed("gemm to gradients", c, |d, c| {
                d.gemm(shape, a, b, true, (c, plain), Epilogue::None)
            })?;
            let bias = self.input(columns)?;
            let c = self.d.alloc(rows * columns)?;
            self.changed("gemm with bias", c, |d, c| {
                d.gemm(shape, a, b, false, (c, plain), Epilogue::Bias(&bias))
            })?;
            for activation in [Activation::GeluTanh, Activation::Silu] {
                let bias = Some(&bias).filter(|_| case % 3 > 0);
                let (c, mut y) = (self.d.alloc(rows * columns)?, self.d.alloc(rows * columns)?);
                self.changed("sums before an activation", c, |d, c| {
                    let epilogue = Epilogue::Activation(bias, activation, &mut y);
                    d.gemm(shape, a, b, false, (c, plain), epilogue)
                })?;
                self.keep("gemm with activation", &y)?;
            }
            if a.1.is_transposed {
                let (c, mut d_bias) = (self.gradient(rows * columns)?, self.gradient(rows)?);
                self.changed("gemm with bias gradient", c, |d, c| {
                    d.gemm(shape, a, b, true, (c, plain), Epilogue::BiasGradient(&mut d_bias))
                })?;
                self.keep("gradient of a bias", &d_bias)?;
            }
        }
        // sums of no numbers
        let (none, c) = (self.input(0)?, self.input(6)?);
        let shape = GemmShape { rows: 2, columns: 3, inner: 0 };
        let empty = (&none, MatrixLayout::rows(0));
        self.changed("gemm of nothing", c, |d, c| {
            let b = (&none, MatrixLayout::rows(3));
            d.gemm(shape, empty, b, false, (c, MatrixLayout::rows(3)), Epilogue::None)
        })
    }

    pub(crate) fn losses(&mut self) -> Result<()> {
        for vocabulary in [5, 64, self.random.below(2, 3000)] {
            let rows = self.random.below(1, 20);
            let words: Vec<u32> = (0..rows + 3).map(|_| self.random.below(0, vocabulary) as u32).collect();
            let targets = self.d.upload_indices(&words)?;
            let range = 2..rows + 2;
            let (logits, mut loss) = (self.input(rows * vocabulary)?, self.d.zeros_as(Dtype::F64, 1)?);
            let run =
                |d: &D, x: &mut Tensor<D>| d.cross_entropy(x, (&targets, range.clone()), 0.125, &mut loss);
            self.changed("cross entropy", logits, run)?;
            self.keep("loss", &loss)?;
            let cut = self.random.below(1, vocabulary);
            let mut parts = self.d.alloc_as(Dtype::F32, 2 * rows * PARTIAL)?;
            let mut exponentials = Vec::new();
            for (rank, words) in [0..cut, cut..vocabulary].into_iter().enumerate() {
                let mut logits = self.input(rows * words.len())?;
                let part = VocabularyPart { rank, words };
                self.d.partial_softmax(&mut logits, (&targets, range.clone()), &part, &mut parts)?;
                exponentials.push((part, logits));
            }
            self.keep("partial softmax", &parts)?;
            for (part, logits) in exponentials {
                self.keep("exponentials", &logits)?;
                self.changed("join softmax", logits, |d, x| {
                    d.join_softmax(x, (&targets, range.clone()), &part, &parts, 0.125, &mut loss)
                })?;
            }
            self.keep("joined loss", &loss)?;
        }
        Ok(())
    }

    pub(crate) fn optimizer(&mut self) -> Result<()> {
        for len in [9, self.random.below(10, 40_000)] {
            let gradients = self.gradient(len)?;
            let mut figures = self.d.zeros_as(Dtype::F64, 3)?;
            self.d.sums_of_squares(&[(&gradients, 2), (&self.input(5)?, 1)], &mut figures)?;
            self.keep("sums of squares", &figures)?;
            let mut clip = self.d.zeros_as(Dtype::F64, 2)?;
            self.d.clip_factor(&figures, 1..3, Some(0.5), &mut clip)?;
            self.keep("norm and factor", &clip)?;
            let cut = self.random.below(1, len);
            let ranges = [(0..cut, 0.1, 3.0), (cut..len, 0.02, 0.0)];
            let ranges = ranges.map(|(elements, learning_rate, weight_decay)| UpdateRange {
                elements,
                learning_rate,
                weight_decay,
            });
            for has_masters in [false, true] {
                let step = self.random.below(1, 50) as u64;
                let adamw = AdamW { step, ..AdamW::default() };
                let (mut mean, mut square) = (self.gradient(len)?, self.d.zeros_as(Dtype::F32, len)?);
                let mut master = self.gradient(len)?;
                let weights = self.input(len)?;
                self.changed("adamw", weights, |d, weights| {
                    let master = has_masters.then_some(&mut master);
                    let state = AdamWState { master, mean: &mut mean, square: &mut square };
                    d.adamw(&adamw, &ranges, &clip, weights, &gradients, state)
                })?;
                for (name, tensor) in [("masters", &master), ("means", &mean), ("squares", &square)] {
                    self.keep(name, tensor)?;
                }
            }
            // a figure that is not finite leaves the weights as they are
            self.d.write_scalars(&[1.0, f64::INFINITY, 1.0], &mut figures)?;
            self.d.clip_factor(&figures, 1..3, None, &mut clip)?;
            let factor = self.d.read(&clip)?[1];
            self.results.push(("no factor".to_owned(), vec![f32::from(u8::from(factor.is_nan()))]));
            let (mut mean, mut square) = (self.gradient(len)?, self.gradient(len)?);
            let weights = self.input(len)?;
            self.changed("adamw without a factor", weights, |d, weights| {
                let state = AdamWState { master: None, mean: &mut mean, square: &mut square };
                d.adamw(&AdamW::default(), &ranges, &clip, weights, &gradients, state)
            })?;
        }
        Ok(())
    }
}

/// Error norm over the true norm; infinite for a number that was not written.
pub(crate) fn relative_error(found: &[f32], truth: &[f32]) -> f64 {
    assert_eq!(found.len(), truth.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(truth).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    let truth = norm(&mut truth.iter().map(|&x| f64::from(x)));
    if difference.is_nan() { f64::INFINITY } else { difference / truth.max(1e-6) }
}
