//! Arguments of a call: which address every tensor of a graph gets.

use super::error::{Error, Result};
use super::graph::{Form, Id};
use super::plan::Plan;
use super::plan_key::PlanKey;
use super::tables::Places;

/// Bytes of an element of rows.
const BF16_BYTES: u64 = 2;

/// Addresses of device memory, all multiples of 16, and the factor on the scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arguments {
    /// Queries, keys and values, bf16 `[tokens, (heads + 2 * kv_heads) * head_dim]`; read.
    pub qkv: u64,
    /// Output, bf16 `[tokens, heads * head_dim]`; written by forward plans, read by backward plans.
    pub output: u64,
    /// Natural logarithm of the sum of the exponentials of the scaled scores, f32 `[tokens, heads]`; written by
    /// forward plans, read by backward plans. A plan of [`Form::Padded`] reads `[segments, heads, longest]` of
    /// its key instead, whose rows behind a segment are never read.
    pub log_sums: u64,
    /// Gradients; of backward plans.
    pub gradients: Option<Gradients>,
    /// Block of [`super::SegmentTables`]; read.
    pub tables: u64,
    /// [`Plan::workspace_bytes`] bytes; overwritten. A multiple of 256.
    pub workspace: u64,
    /// Factor on the scores.
    pub scale: f32,
}

/// Addresses of gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gradients {
    /// Gradient of the output, bf16 `[tokens, heads * head_dim]`; read.
    pub d_output: u64,
    /// Gradient of queries, keys and values, bf16 `[tokens, (heads + 2 * kv_heads) * head_dim]`; written.
    pub d_qkv: u64,
}

/// Values of the host that a call reads by their addresses.
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

impl Arguments {
    /// Lists the tensors of a plan's graph with their addresses.
    pub(super) fn bindings(&self, plan: &Plan, values: &HostValues) -> Result<Vec<(Id, u64)>> {
        let key = plan.key();
        let places = Places::of(key);
        let table = |place: usize| self.tables + place as u64;
        let [queries, keys, vectors] = columns(key, self.qkv);
        let mut bindings = vec![
            (Id::Queries, queries),
            (Id::Keys, keys),
            (Id::Values, vectors),
            (Id::Output, self.output),
            (Id::LogSums, self.log_sums),
            (Id::QueryLengths, table(places.lengths)),
            (Id::KeyLengths, table(places.lengths)),
            (Id::RowOffsets, table(places.rows)),
            (Id::OutputOffsets, table(places.outputs)),
            (Id::LogSumOffsets, table(places.log_sums)),
            (Id::Scale, address_of(&values.scale)),
        ];
        if plan.form() != Form::Single {
            bindings.push((Id::Padding, address_of(&values.masked)));
        }
        if key.is_causal {
            bindings.push((Id::Later, address_of(&values.masked)));
        }
        if key.is_backward {
            let Some(gradients) = self.gradients else {
                let reason = "a backward plan needs their addresses".to_owned();
                return Err(Error::Shape { setting: "gradients", reason });
            };
            let [d_queries, d_keys, d_values] = columns(key, gradients.d_qkv);
            bindings.push((Id::DOutput, gradients.d_output));
            bindings.extend([(Id::DQueries, d_queries), (Id::DKeys, d_keys), (Id::DValues, d_values)]);
            if plan.form() != Form::Single {
                bindings.push((Id::One, address_of(&values.one)));
            }
        }
        let mut free = self.workspace + plan.own_workspace_bytes();
        for (id, bytes) in plan.form().scratch(key) {
            bindings.push((id, free));
            free += bytes;
        }
        Ok(bindings)
    }
}

/// Addresses of queries, keys and values in a packed matrix.
fn columns(key: &PlanKey, matrix: u64) -> [u64; 3] {
    let head = u64::from(key.head_dim) * BF16_BYTES;
    let keys = matrix + u64::from(key.heads) * head;
    [matrix, keys, keys + u64::from(key.kv_heads) * head]
}

fn address_of(value: &f32) -> u64 {
    std::ptr::from_ref(value).expose_provenance() as u64
}
