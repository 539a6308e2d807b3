//! Logit cross entropy, complete or sharded over ranks.

use std::ops::Range;

use dflop_device::ops::cross_entropy::CrossEntropy;
use dflop_device::ops::vocab_parallel_cross_entropy::{PARTIAL, VocabParallelCrossEntropy, VocabularyPart};
use dflop_device::{Dtype, Result, Tensor};

use super::{THREADS, width};
use crate::compiler::{Macros, Source};
use crate::device::{Address, Cuda};
use crate::driver::{Arguments, Grid};

/// Returns a grid with a block for every logit row.
fn by_rows(rows: usize, columns: usize) -> Grid {
    Grid::blocks(rows, columns.next_multiple_of(32).clamp(32, 4 * THREADS as usize) as u32)
}

/// Returns the address of the first target in a range.
fn targets_address(targets: &Tensor<Cuda>, range: &Range<usize>) -> u64 {
    assert!(range.end <= targets.len(), "every row has a target");
    targets.address() + (range.start * Dtype::U32.bytes()) as u64
}

/// Returns the number of logit columns.
fn columns(logits: &Tensor<Cuda>, rows: usize) -> usize {
    let columns = logits.len() / rows.max(1);
    assert_eq!(columns * rows, logits.len(), "every target has a row");
    columns
}

impl Cuda {
    /// Adds losses to a scalar.
    fn add_losses(&self, losses: &Tensor<Self>, loss: &mut Tensor<Self>) -> Result<()> {
        assert!(loss.dtype() == Dtype::F64 && loss.len() == 1, "a loss is one number");
        let arguments = Arguments::default().read(losses).int(losses.len()).write(loss);
        self.launch(Source::Losses, "add_losses", Macros::default(), Grid::blocks(1, 1), arguments)
    }
}

impl CrossEntropy for Cuda {
    fn cross_entropy(
        &self,
        logits: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        scale: f64,
        loss: &mut Tensor<Self>,
    ) -> Result<()> {
        let rows = range.len();
        if rows == 0 {
            return Ok(());
        }
        let columns = columns(logits, rows);
        let mut losses = self.allocate(Dtype::F64, rows)?;
        let macros = Macros::types(&[logits.dtype()]).number("WIDTH", width(columns, &[logits]));
        let arguments = Arguments::default().write(logits).address(targets_address(targets, &range));
        let arguments = arguments.write(&mut losses).int(columns).float(scale as f32);
        self.launch(Source::CrossEntropy, "cross_entropy", macros, by_rows(rows, columns), arguments)?;
        self.add_losses(&losses, loss)
    }
}

impl VocabParallelCrossEntropy for Cuda {
    fn partial_softmax(
        &self,
        logits: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        part: &VocabularyPart,
        parts: &mut Tensor<Self>,
    ) -> Result<()> {
        let (rows, columns) = (range.len(), columns(logits, range.len()));
        let first = part.rank * rows * PARTIAL;
        assert!(
            parts.dtype() == Dtype::F32 && first + rows * PARTIAL <= parts.len(),
            "every rank has its rows"
        );
        let own = parts.address() + (first * Dtype::F32.bytes()) as u64;
        let macros = Macros::types(&[logits.dtype()]);
        let arguments = Arguments::default().write(logits).address(targets_address(targets, &range));
        let arguments = arguments.address(own).int(columns).int(part.words.start);
        let source = Source::VocabParallelCrossEntropy;
        self.launch(source, "partial_softmax", macros, by_rows(rows, columns), arguments)
    }

    fn join_softmax(
        &self,
        exponentials: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        part: &VocabularyPart,
        parts: &Tensor<Self>,
        scale: f64,
        loss: &mut Tensor<Self>,
    ) -> Result<()> {
        let rows = range.len();
        if rows == 0 {
            return Ok(());
        }
        let columns = columns(exponentials, rows);
        let ranks = parts.len() / (rows * PARTIAL);
        let mut losses = self.allocate(Dtype::F64, rows)?;
        let macros = Macros::types(&[exponentials.dtype()]);
        let arguments = Arguments::default().write(exponentials).address(targets_address(targets, &range));
        let arguments = arguments.read(parts).write(&mut losses).int(columns).int(part.words.start);
        let arguments = arguments.int(ranks).int(part.rank).double(scale);
        let source = Source::VocabParallelCrossEntropy;
        self.launch(source, "join_softmax", macros, by_rows(rows, columns), arguments)?;
        self.add_losses(&losses, loss)
    }
}
