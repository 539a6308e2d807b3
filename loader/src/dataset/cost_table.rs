//! Predicts the cost of every sample in a dataset, as an Arrow table.

use std::ops::Range;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray, UInt32Array, UInt64Array};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use dflop_costmodel::{CostModel, SampleCost, SampleShape};

use super::Dataset;

/// Number of rows per record batch.
const BATCH_ROWS: u64 = 1 << 16;

/// Predicts the cost of every sample in a dataset, in index order.
///
/// Columns: `sample` (number in the index), `key`, `refused` (reason why the model rejects the sample),
/// `tokens`, `target_tokens`, `encoder_items`, `encoder_tokens`, and `MODULE_ns` for each model module,
/// forward and backward time in nanoseconds. Counts and times are null for a rejected sample.
///
/// # Panics
/// Never: the columns match the schema.
#[must_use]
pub fn cost_table(dataset: &Dataset, model: &CostModel) -> (SchemaRef, Vec<RecordBatch>) {
    let times =
        model.modules().iter().map(|module| Field::new(format!("{module}_ns"), DataType::UInt64, true));
    let counts = ["tokens", "target_tokens", "encoder_items", "encoder_tokens"];
    let counts = counts.map(|name| Field::new(name, DataType::UInt32, true));
    let mut fields = vec![
        Field::new("sample", DataType::UInt64, false),
        Field::new("key", DataType::Utf8, false),
        Field::new("refused", DataType::Utf8, true),
    ];
    fields.extend(counts);
    fields.extend(times);
    let schema = Arc::new(Schema::new(fields));
    let mut batches = Vec::new();
    for start in (0..dataset.len()).step_by(BATCH_ROWS as usize) {
        let places = start..(start + BATCH_ROWS).min(dataset.len());
        let columns = columns(dataset, model, places);
        batches.push(RecordBatch::try_new(schema.clone(), columns).expect("columns are those of the schema"));
    }
    (schema, batches)
}

fn columns(dataset: &Dataset, model: &CostModel, places: Range<u64>) -> Vec<ArrayRef> {
    let mut shape = SampleShape::default();
    let numbers: Vec<u64> = places.map(|place| dataset.sample_number(place)).collect();
    let rows = numbers.iter().map(|&number| {
        let row = dataset.index().sample(number);
        row.read_shape(&mut shape);
        (row.key(), model.predict(&shape))
    });
    let rows: Vec<_> = rows.collect();
    let count = |of: fn(&SampleCost) -> u32| {
        Arc::new(rows.iter().map(|(_, cost)| cost.as_ref().ok().map(of)).collect::<UInt32Array>()) as ArrayRef
    };
    let mut columns: Vec<ArrayRef> = vec![
        Arc::new(UInt64Array::from(numbers.clone())),
        Arc::new(StringArray::from_iter_values(rows.iter().map(|(key, _)| key))),
        Arc::new(
            rows.iter()
                .map(|(_, cost)| cost.as_ref().err().map(ToString::to_string))
                .collect::<StringArray>(),
        ),
        count(|cost| cost.tokens),
        count(|cost| cost.target_tokens),
        count(|cost| cost.encoder_items),
        count(|cost| cost.encoder_tokens),
    ];
    for module in 0..model.modules().len() {
        let ns =
            rows.iter().map(|(_, cost)| cost.as_ref().ok().map(|cost| cost.module_ns.as_slice()[module]));
        columns.push(Arc::new(ns.collect::<UInt64Array>()));
    }
    columns
}
