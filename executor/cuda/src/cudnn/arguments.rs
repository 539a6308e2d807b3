//! Call arguments: an address for every tensor in a graph.

use super::graph::{Form, Id, SCRATCH_ALIGNMENT_BYTES};
use super::library::{Error, PlanKey, Result};
use super::plan::Places;

/// Alignment of argument addresses in bytes.
const ALIGNMENT_BYTES: u64 = 16;
/// Size of a row element in bytes.
const BF16_BYTES: u64 = 2;

/// Device memory addresses, all multiples of 16, and the score factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arguments {
    /// Number of rows in all segments.
    pub tokens: u32,
    /// Queries, keys and values, bf16 `[tokens, (heads + 2 * kv_heads) * head_dim]`; read.
    pub qkv: u64,
    /// Output, bf16 `[tokens, heads * head_dim]`; written by forward plans, read by backward plans.
    pub output: u64,
    /// Natural logarithm of the exponential sum over scaled scores, f32 `[tokens, heads]`; written by
    /// forward plans, read by backward plans.
    pub log_sums: u64,
    /// Gradients, for backward plans.
    pub gradients: Option<Gradients>,
    /// [`super::SegmentTables`] block; read.
    pub tables: u64,
    /// [`super::Plan::workspace_bytes`] bytes; overwritten. A multiple of 256.
    pub workspace: u64,
    /// Score factor.
    pub scale: f32,
}

/// Gradient addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gradients {
    /// Output gradient, bf16 `[tokens, heads * head_dim]`; read.
    pub d_output: u64,
    /// Gradient for queries, keys and values, bf16 `[tokens, (heads + 2 * kv_heads) * head_dim]`; written.
    pub d_qkv: u64,
}

/// Host values that a call reads by address.
pub(super) struct HostValues {
    scale: f32,
    masked: f32,
    one: f32,
}

impl HostValues {
    pub(super) const fn of(arguments: &Arguments) -> Self {
        Self { scale: arguments.scale, masked: f32::NEG_INFINITY, one: 1.0 }
    }
}

/// Column block that is copied between matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ColumnCopy {
    /// Addresses of the first element, and number of bytes from a row to the next.
    pub(super) from: (u64, usize),
    pub(super) to: (u64, usize),
    pub(super) width_bytes: usize,
    pub(super) rows: usize,
}

/// Tensor addresses in a graph, and the copies to make after the call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Bindings {
    pub(super) addresses: Vec<(Id, u64)>,
    pub(super) copies: Vec<ColumnCopy>,
}

impl Arguments {
    /// Binds the tensors in the graph for a key.
    ///
    /// - `own_workspace_bytes`: number of bytes at the start of the workspace that the engine uses
    pub(super) fn bind(
        &self,
        key: &PlanKey,
        form: Form,
        own_workspace_bytes: u64,
        values: &HostValues,
    ) -> Result<Bindings> {
        self.check(key)?;
        let mut bindings = Bindings { addresses: self.inputs(key, form, values), copies: Vec::new() };
        let mut free = self.workspace + own_workspace_bytes;
        for (id, bytes) in form.scratch(key) {
            bindings.addresses.push((id, free));
            free += bytes;
        }
        if key.is_backward {
            let Some(gradients) = self.gradients else {
                let reason = "a backward plan needs their addresses".to_owned();
                return Err(Error::Shape { setting: "gradients", reason });
            };
            bindings.add_gradients(key, gradients, self.tokens);
        }
        Ok(bindings)
    }

    /// Checks arguments that could make a kernel write outside the tensors.
    fn check(&self, key: &PlanKey) -> Result<()> {
        let invalid = |setting, reason| Err(Error::Shape { setting, reason });
        if key.is_backward && self.tokens > key.tokens {
            return invalid("tokens", format!("the plan is for {} rows, found {}", key.tokens, self.tokens));
        }
        let Gradients { d_output, d_qkv } = self.gradients.unwrap_or_default();
        let rows = [self.qkv, self.output, self.log_sums, self.tables, d_output, d_qkv];
        let is_aligned = |&address: &u64| address.is_multiple_of(ALIGNMENT_BYTES);
        if !rows.iter().all(is_aligned) || !self.workspace.is_multiple_of(SCRATCH_ALIGNMENT_BYTES) {
            let reason = format!("expected multiples of {ALIGNMENT_BYTES}, found {self:x?}");
            return invalid("addresses", reason);
        }
        Ok(())
    }

    /// Returns the tensors in forward and backward graphs; `Output` and `LogSums` are written by the forward
    /// graph.
    fn inputs(&self, key: &PlanKey, form: Form, values: &HostValues) -> Vec<(Id, u64)> {
        let places = Places::of(key);
        let table = |place: usize| self.tables + place as u64;
        let [queries, keys, vectors] = columns(key, self.qkv);
        let mut addresses = vec![
            (Id::Queries, queries),
            (Id::Keys, keys),
            (Id::Values, vectors),
            (Id::Output, self.output),
            (Id::QueryLengths, table(places.lengths)),
            (Id::KeyLengths, table(places.lengths)),
            (Id::RowOffsets, table(places.rows)),
            (Id::OutputOffsets, table(places.outputs)),
            (Id::Scale, scalar_address(&values.scale)),
        ];
        if form != Form::Padded {
            addresses.push((Id::LogSums, self.log_sums));
            addresses.push((Id::LogSumOffsets, table(places.log_sums)));
        }
        if form != Form::Single {
            addresses.push((Id::Padding, scalar_address(&values.masked)));
        }
        if form != Form::Single && key.is_backward {
            addresses.push((Id::One, scalar_address(&values.one)));
        }
        if key.is_causal {
            addresses.push((Id::Later, scalar_address(&values.masked)));
        }
        if form.has_gradients_apart(key) {
            addresses.push((Id::KeyOffsets, table(places.keys)));
        }
        addresses
    }
}

impl Bindings {
    fn add_gradients(&mut self, key: &PlanKey, gradients: Gradients, tokens: u32) {
        let [d_queries, d_keys, d_values] = columns(key, gradients.d_qkv);
        self.addresses.extend([(Id::DOutput, gradients.d_output), (Id::DQueries, d_queries)]);
        let width_bytes = (u64::from(key.kv_heads * key.head_dim) * BF16_BYTES) as usize;
        let row_bytes = (u64::from(key.row()) * BF16_BYTES) as usize;
        for (id, columns) in [(Id::DKeys, d_keys), (Id::DValues, d_values)] {
            match self.addresses.iter().find(|&&(bound, _)| bound == id) {
                Some(&(_, apart)) => self.copies.push(ColumnCopy {
                    from: (apart, width_bytes),
                    to: (columns, row_bytes),
                    width_bytes,
                    rows: tokens as usize,
                }),
                None => self.addresses.push((id, columns)),
            }
        }
    }
}

/// Returns the addresses of queries, keys and values in a packed matrix.
fn columns(key: &PlanKey, matrix: u64) -> [u64; 3] {
    let head = u64::from(key.head_dim) * BF16_BYTES;
    let keys = matrix + u64::from(key.heads) * head;
    [matrix, keys, keys + u64::from(key.kv_heads) * head]
}

fn scalar_address(value: &f32) -> u64 {
    std::ptr::from_ref(value).expose_provenance() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cudnn::library::Heads;

    fn arguments() -> Arguments {
        Arguments {
            tokens: 8000,
            qkv: 1 << 32,
            output: 2 << 32,
            log_sums: 3 << 32,
            gradients: Some(Gradients { d_output: 4 << 32, d_qkv: 5 << 32 }),
            tables: 6 << 32,
            workspace: 7 << 32,
            scale: 0.5,
        }
    }

    fn bind(kv_heads: u32, form: Form) -> (PlanKey, Bindings) {
        let heads = Heads { heads: 28, kv_heads, head_dim: 128, is_causal: true };
        let key = PlanKey::backward(heads, &[0, 100, 8000], false);
        let values = HostValues::of(&arguments());
        (key, arguments().bind(&key, form, 4096, &values).unwrap())
    }

    #[test]
    fn every_tensor_has_one_address() {
        for form in [Form::Single, Form::Composite, Form::Direct, Form::Padded] {
            for kv_heads in [4, 28] {
                let (_, bindings) = bind(kv_heads, form);
                let mut ids: Vec<i64> = bindings.addresses.iter().map(|&(id, _)| id as i64).collect();
                ids.sort_unstable();
                ids.dedup();
                assert_eq!(ids.len(), bindings.addresses.len());
                assert!(bindings.addresses.iter().all(|&(_, address)| address % 4 == 0));
            }
        }
    }

    #[test]
    fn shared_keys_have_gradients_apart_that_are_copied() {
        let (key, bindings) = bind(4, Form::Composite);
        let [keys, values] = bindings.copies[..] else { panic!("two copies") };
        assert_eq!(keys.to, ((5 << 32) + 28 * 128 * 2, 36 * 128 * 2));
        assert_eq!(values.to.0 - keys.to.0, 4 * 128 * 2);
        assert_eq!((keys.from.1, keys.width_bytes, keys.rows), (1024, 1024, 8000));
        let bytes: u64 = Form::Composite.scratch(&key).iter().map(|&(_, bytes)| bytes).sum();
        let end = (7 << 32) + 4096 + bytes;
        assert!(values.from.0 < end && keys.from.0 > (7 << 32) + 4096);
    }

    #[test]
    fn own_keys_have_gradients_in_the_matrix() {
        let (_, bindings) = bind(28, Form::Composite);
        assert!(bindings.copies.is_empty());
        assert!(bindings.addresses.contains(&(Id::DKeys, (5 << 32) + 28 * 128 * 2)));
    }

    #[test]
    fn arguments_that_do_not_fit_are_refused() {
        let (key, _) = bind(4, Form::Composite);
        let values = HostValues::of(&arguments());
        let refused = |arguments: Arguments| arguments.bind(&key, Form::Composite, 0, &values).is_err();
        assert!(refused(Arguments { tokens: 8193, ..arguments() }));
        assert!(refused(Arguments { qkv: 8, ..arguments() }));
        assert!(refused(Arguments { workspace: 128, ..arguments() }));
        assert!(!refused(arguments()));
    }

    #[test]
    fn a_backward_plan_needs_gradients() {
        let (key, _) = bind(4, Form::Single);
        let without = Arguments { gradients: None, ..arguments() };
        let values = HostValues::of(&without);
        assert!(without.bind(&key, Form::Single, 0, &values).is_err());
        let forward = PlanKey { is_backward: false, ..key };
        assert!(without.bind(&forward, Form::Single, 0, &values).unwrap().copies.is_empty());
    }
}
