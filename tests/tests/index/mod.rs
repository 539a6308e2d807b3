//! Tests the index: building in parts, foreign indexes, token counts.

mod foreign;
mod index_parts;
mod token_counts;
