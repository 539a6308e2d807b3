//! Answers routes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use dflop_loader::error::{BoxError, Skipped};
use futures::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::StatusCode;
use hyper::body::Frame;
use hyper::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, HeaderName, HeaderValue};
use serde_json::json;
use tokio::sync::Semaphore;

use super::content::{FIELD_BYTES_MAX, PREFIX_BYTES, RENDERED, THUMBNAIL, content, content_type, scaled};
use super::http::{
    Body, ByteRange, Refusal, Reply, Route, attachment, byte_range, bytes, json, refusal, text,
};
use super::query::{Filter, Histogram, Places, Query, histogram, page};
use super::table::{Column, describe, reason_group, skipped};
use super::{View, page as assets};

/// Number of field bytes per read.
const CHUNK_BYTES: u64 = 1 << 20;
/// Requests that decode at the same time, each up to some hundred MB.
static DECODING: Semaphore = Semaphore::const_new(2);

/// Answers a request that passed the gate; blocks on local disks and on decoding.
///
/// - `range`: the header `Range`
pub(super) async fn answer(view: &Arc<View>, route: Route, range: Option<&str>) -> Reply {
    match route {
        Route::Page => bytes(StatusCode::OK, "text/html; charset=utf-8", assets::PAGE),
        Route::Style => bytes(StatusCode::OK, "text/css; charset=utf-8", assets::style()),
        Route::Script => bytes(StatusCode::OK, "text/javascript; charset=utf-8", assets::script()),
        Route::Icon => bytes(StatusCode::OK, "image/svg+xml", assets::ICON),
        Route::Summary => json(&summary(view)),
        Route::Samples(query) => samples(view, &query),
        Route::Histogram(query) => json(&distribution(view, &query)),
        Route::Skipped(query) => json(&skipped_page(view.dataset.skipped(), &query)),
        Route::Sample(place) => sample(view, place).await,
        Route::Field(place, field) => field_bytes(view, place, field, range).await,
        Route::Thumbnail(place, field) => thumbnail(view, place, field).await,
        Route::Rendered(place, field) => image(view, place, field, RENDERED).await,
    }
}

fn summary(view: &View) -> serde_json::Value {
    let index = view.dataset.index();
    let mut extensions: Vec<&str> = index.extensions().collect();
    extensions.sort_unstable();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "shards": index.shards().len(),
        "first_shard": dflop_loader::store::redact(&index.shards()[0].url),
        "split": view.dataset.split_name(),
        "samples": view.dataset.len(),
        "skipped": view.dataset.skipped().len(),
        "refused": view.table.refused(),
        "costs": view.costs,
        "modules": view.model.modules().iter().map(ToString::to_string).collect::<Vec<_>>(),
        "extensions": extensions,
        "unused": index.unused(),
        "without_target": index.samples_without_target(),
    })
}

/// Lists skipped samples, and counts all of them by reason.
fn skipped_page(all: &[Skipped], query: &Query) -> serde_json::Value {
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for skipped in all {
        *counts.entry(reason_group(&skipped.reason)).or_default() += 1;
    }
    let mut reasons: Vec<(&String, &u64)> = counts.iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let is_shown =
        |skipped: &&Skipped| query.reason.is_empty() || reason_group(&skipped.reason) == query.reason;
    let count = all.iter().filter(is_shown).count();
    let shown = all.iter().filter(is_shown).skip(query.offset as usize).take(query.limit as usize);
    json!({"count": count, "reasons": reasons, "skipped": shown.map(skipped).collect::<Vec<_>>()})
}

/// Counts the samples that meet a filter without the counted column's range, so that a range can be widened.
fn distribution(view: &View, query: &Query) -> Histogram {
    let filter = query.filter.without(query.column);
    let (places, _) = selected(view, &filter, query.column);
    histogram(places.iter().map(|place| view.table.value(query.column, *place)))
}

/// Returns the places of the samples that meet a filter, and the number of searched samples if it has a text.
fn selected(view: &View, filter: &Filter, column: Column) -> (Places, Option<u32>) {
    let numbers = Filter { text: String::new(), ..filter.clone() };
    let places = view.selections.select(&view.dataset, &view.table, &numbers, column);
    if filter.text.is_empty() {
        return (places, None);
    }
    let search = view.text_search.search(&view.dataset, &filter.text);
    let searched = search.searched(view.table.len());
    (Arc::new(search.retain(&places)), Some(searched))
}

fn samples(view: &View, query: &Query) -> Reply {
    let (places, searched) = selected(view, &query.filter, query.column);
    let shown = page(&places, query);
    let rows: Vec<_> = shown.into_iter().map(|place| describe(&view.dataset, &view.model, place)).collect();
    let dearest = view.selections.select(&view.dataset, &view.table, &Filter::default(), Column::CostNs);
    let cost_ns_max = dearest.last().map_or(0, |place| view.table.value(Column::CostNs, *place));
    json(&json!({
        "count": places.len(),
        "offset": query.offset,
        "cost_ns_max": cost_ns_max,
        "samples": rows,
        "searched": searched,
    }))
}

/// Returns the number of a sample in the index, if there is one at this place.
fn number(view: &View, place: u32) -> Option<u64> {
    (u64::from(place) < view.dataset.len()).then(|| view.dataset.sample_number(place.into()))
}

fn unreadable(error: &dflop_loader::Error) -> Reply {
    let error: &dyn std::error::Error = error;
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    let message = causes.fold(error.to_string(), |message, cause| format!("{message}: {cause}"));
    text(StatusCode::INTERNAL_SERVER_ERROR, &dflop_loader::store::redact(&message))
}

async fn sample(view: &View, place: u32) -> Reply {
    let Some(number) = number(view, place) else { return refusal(&Refusal::NotFound) };
    let Ok(_permit) = DECODING.acquire().await else { return refusal(&Refusal::NotFound) };
    match view.readers.sample(number, FIELD_BYTES_MAX).await {
        Ok(raw) => {
            let described = describe(&view.dataset, &view.model, place);
            json(&json!({"sample": described, "content": content(&raw)}))
        }
        Err(error) => unreadable(&error),
    }
}

/// Answers with a small image, or with a sign in its place: a table with damaged images is no failure.
async fn thumbnail(view: &View, place: u32, field: usize) -> Reply {
    let reply = image(view, place, field, THUMBNAIL).await;
    if reply.status() == StatusCode::UNPROCESSABLE_ENTITY {
        return bytes(StatusCode::OK, "image/svg+xml", assets::BROKEN);
    }
    reply
}

async fn image(view: &View, place: u32, field: usize, size: (u32, u8)) -> Reply {
    let Some((number, length, _)) = located(view, place, field) else { return refusal(&Refusal::NotFound) };
    if length > FIELD_BYTES_MAX {
        return text(StatusCode::UNPROCESSABLE_ENTITY, "the image is too large to be scaled");
    }
    let Ok(_permit) = DECODING.acquire().await else { return refusal(&Refusal::NotFound) };
    let payload = match view.readers.field(number, field, 0..length).await {
        Ok(payload) => payload,
        Err(error) => return unreadable(&error),
    };
    match scaled(&payload, size) {
        Ok(jpeg) => bytes(StatusCode::OK, "image/jpeg", jpeg),
        Err(reason) => text(StatusCode::UNPROCESSABLE_ENTITY, &reason),
    }
}

/// Returns the number of a sample in the index, and the length and the name of a field.
fn located(view: &View, place: u32, field: usize) -> Option<(u64, u64, String)> {
    let number = number(view, place)?;
    let row = view.dataset.index().sample(number);
    let key = row.key().rsplit('/').next().unwrap_or_default();
    row.fields().nth(field).map(|field| (number, field.bytes, format!("{key}.{}", field.extension)))
}

/// Answers with the field bytes, read while they are sent.
async fn field_bytes(view: &Arc<View>, place: u32, field: usize, range: Option<&str>) -> Reply {
    let Some((number, length, name)) = located(view, place, field) else {
        return refusal(&Refusal::NotFound);
    };
    let prefix = match view.readers.field(number, field, 0..PREFIX_BYTES).await {
        Ok(prefix) => prefix,
        Err(error) => return unreadable(&error),
    };
    let extension =
        view.dataset.index().sample(number).fields().nth(field).map_or("", |field| field.extension);
    let shown = content_type(extension, &prefix);
    let (status, part) = match byte_range(range, length) {
        ByteRange::Whole => (StatusCode::OK, 0..length),
        ByteRange::Part(part) => (StatusCode::PARTIAL_CONTENT, part),
        ByteRange::Outside => {
            let mut reply = text(StatusCode::RANGE_NOT_SATISFIABLE, "the range is outside of the field");
            set(&mut reply, CONTENT_RANGE, &format!("bytes */{length}"));
            return reply;
        }
    };
    let mut reply = bytes(status, shown.unwrap_or("application/octet-stream"), Bytes::new());
    if shown.is_none() {
        attachment(&mut reply, &name);
    }
    if status == StatusCode::PARTIAL_CONTENT {
        set(&mut reply, CONTENT_RANGE, &format!("bytes {}-{}/{length}", part.start, part.end - 1));
    }
    set(&mut reply, ACCEPT_RANGES, "bytes");
    set(&mut reply, CONTENT_LENGTH, &(part.end - part.start).to_string());
    *reply.body_mut() = read_parts(view.clone(), number, field, part);
    reply
}

fn set(reply: &mut Reply, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        reply.headers_mut().insert(name, value);
    }
}

/// Streams a part of a field in chunks, so that a long video is never in memory as a whole.
fn read_parts(view: Arc<View>, number: u64, field: usize, part: Range<u64>) -> Body {
    let chunks = stream::unfold(part, move |rest| {
        let view = view.clone();
        async move {
            if rest.is_empty() {
                return None;
            }
            let end = rest.end.min(rest.start + CHUNK_BYTES);
            let chunk = read_blocking(view, number, field, rest.start..end).await;
            // After an error the connection ends, because the length cannot be kept.
            let next = if chunk.is_ok() { end..rest.end } else { rest.end..rest.end };
            Some((chunk.map(Frame::data), next))
        }
    });
    StreamBody::new(chunks).boxed_unsync()
}

async fn read_blocking(
    view: Arc<View>,
    number: u64,
    field: usize,
    range: Range<u64>,
) -> Result<Bytes, BoxError> {
    let runtime = tokio::runtime::Handle::current();
    let read = move || runtime.block_on(view.readers.field(number, field, range));
    Ok(tokio::task::spawn_blocking(read).await??)
}
