//! Tests the index: building at once and in parts, foreign indexes, token counts.

mod building;
mod foreign;
mod index_parts;
mod token_counts;
