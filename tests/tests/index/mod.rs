//! Tests the index: building at once and in parts, token counts.

mod building;
mod index_parts;
mod token_counts;
