//! Attention over random segments, for any device.

use dflop_device::ops::attention::AttentionShape;
use dflop_device::{Device, Dtype, HostSegments, KeyRanges, Result, Segments};

use crate::cases::Cases;

/// Head widths: widths with special bf16 kernels, and other widths.
const HEADS: [usize; 9] = [64, 72, 80, 96, 128, 1, 24, 100, 256];

/// Token window.
#[derive(Clone, Copy)]
pub(crate) enum Window {
    /// A token attends to as many tokens up to itself.
    Sliding(usize),
    /// A token attends to the tokens in the same chunk of a segment up to itself. After a chunk border,
    /// queries have no key among the first keys of their block.
    Chunk(usize),
}

impl<D: Device> Cases<'_, D> {
    pub(crate) fn attention(&mut self) -> Result<()> {
        for (case, head_dim) in HEADS.into_iter().enumerate() {
            let (kv_heads, group) = ([1, 2][case % 2], [1, 2, 3][case % 3]);
            let is_causal = self.random.below(0, 2) == 0;
            let scale = [0.19, -0.3, 0.0][self.random.below(0, 3)];
            let shape = AttentionShape { heads: kv_heads * group, kv_heads, head_dim, scale, is_causal };
            self.attention_around_blocks(&shape, None, 0.0)?;
            let tokens = self.random.below(1, 100);
            for window in [Window::Sliding(tokens), Window::Chunk(tokens)] {
                self.attention_around_blocks(&shape, Some(window), 0.0)?;
            }
        }
        self.many_heads()
    }

    /// Passes with so many key heads that blocks share none, and with fewer, where several blocks own the
    /// same head.
    pub(crate) fn many_heads(&mut self) -> Result<()> {
        for kv_heads in [16, 8] {
            let shape = AttentionShape { heads: 32, kv_heads, head_dim: 64, scale: 0.19, is_causal: true };
            self.attention_over(&shape, &[1, 17, 66], None, 0.0)?;
        }
        Ok(())
    }

    /// Key ranges: a causal window, and rows that see each other as a whole.
    fn ranges(&mut self, starts: &[u32], window: Window) -> KeyRanges {
        let mut keys = Vec::new();
        for pair in starts.windows(2) {
            let (mut row, end) = (pair[0], pair[1]);
            while row < end {
                let block = if self.random.below(0, 2) == 0 { 1 } else { self.random.below(1, 40) };
                let behind = end.min(row + block as u32);
                let first = |query: u32| match window {
                    Window::Sliding(tokens) => (query + 1).saturating_sub(tokens as u32).max(pair[0]),
                    Window::Chunk(tokens) => query - (query - pair[0]) % tokens as u32,
                };
                keys.extend((row..behind).map(|query| [first(query), behind]));
                row = behind;
            }
        }
        KeyRanges::new(&keys)
    }

    /// Both passes over segments with lengths around a block's row count.
    ///
    /// - `window`: mask window; the shape's mask without a window
    /// - `offset`: added to all numbers; with a negative scale, exponential sums become small, and query
    ///   gradients become differences of large numbers
    pub(crate) fn attention_around_blocks(
        &mut self,
        shape: &AttentionShape,
        window: Option<Window>,
        offset: f32,
    ) -> Result<()> {
        let lens = [0, 1, self.random.below(2, 64), 64, self.random.below(65, 140)];
        self.attention_over(shape, &lens, window, offset)
    }

    fn attention_over(
        &mut self,
        shape: &AttentionShape,
        lens: &[usize],
        window: Option<Window>,
        offset: f32,
    ) -> Result<()> {
        let head_dim = shape.head_dim;
        let far = match window {
            _ if offset != 0.0 => "far ",
            Some(_) => "ranges of ",
            None => "",
        };
        let ends = lens.iter().scan(0, |end, &len| {
            *end += len as u32;
            Some(*end)
        });
        let starts: Vec<u32> = std::iter::once(0).chain(ends).collect();
        let host = HostSegments::new(&starts);
        let host = match window {
            Some(window) => host.ranged(self.ranges(&starts, window)),
            None => host,
        };
        let segments = Segments::of(self.d, host)?;
        let rows = segments.host().rows();
        let mut values = self.random.numbers(rows * shape.row());
        for value in &mut values {
            *value += offset;
        }
        let qkv = self.d.upload(&values)?;
        let mut log_sums = self.d.alloc_as(Dtype::F32, rows * shape.heads)?;
        let mut output = self.d.alloc(rows * shape.output())?;
        self.d.attention(shape, &segments, &qkv, &mut output, &mut log_sums)?;
        self.keep(&format!("{far}attention {head_dim}"), &output)?;
        self.keep(&format!("{far}attention sums {head_dim}"), &log_sums)?;
        let d_output = self.input(rows * shape.output())?;
        let d_qkv = self.d.attention_backward(shape, &segments, &qkv, (&output, &log_sums), &d_output)?;
        let d_qkv = self.d.download(&d_qkv)?;
        let columns = [shape.output(), shape.kv_heads * head_dim, shape.kv_heads * head_dim];
        let mut first = 0;
        for (name, width) in ["queries", "keys", "values"].into_iter().zip(columns) {
            let part = |row: &[f32]| row[first..first + width].to_vec();
            let values = d_qkv.chunks(shape.row()).flat_map(part).collect();
            self.results.push((format!("{far}attention gradient of {name} {head_dim}"), values));
            first += width;
        }
        Ok(())
    }
}
