//! Names the media fields of a row.
//!
//! Media in a modality are named `jpg`, or `0.jpg`, `1.jpg` if there is more than one medium, as in a packed
//! manifest. If media in a modality come from more than one column, this rule applies to the column that
//! documents refer to, and other names have the column name as prefix: `mask.png`.

use dflop_samples::media::{Modality, extension_modality};
use dflop_samples::sample::document::MEDIA_COLUMNS;

use super::cell::Cell;
use super::media::RowMedium;

/// Returns the extension for each medium, all different.
pub(super) fn field_names(media: &[RowMedium]) -> Vec<String> {
    let primary = Modality::ALL.map(|modality| primary_column(media, modality));
    let is_primary = |medium: &RowMedium| {
        extension_modality(&medium.extension).map_or(medium.column == medium.extension, |modality| {
            primary[modality as usize] == Some(medium.column.as_str())
        })
    };
    let is_sibling = |a: &RowMedium, b: &RowMedium| {
        a.column == b.column && extension_modality(&a.extension) == extension_modality(&b.extension)
    };
    let name = |(at, medium): (usize, &RowMedium)| {
        let siblings = media.iter().filter(|other| is_sibling(other, medium)).count();
        let number = media[..at].iter().filter(|other| is_sibling(other, medium)).count();
        let number = if siblings > 1 { format!("{number}.") } else { String::new() };
        let RowMedium { column, extension, .. } = medium;
        if is_primary(medium) {
            return format!("{number}{extension}");
        }
        // A column that is named as a field in this modality is that field, as in rows created from shards.
        if extension_modality(column).is_some() && extension_modality(column) == extension_modality(extension)
        {
            return format!("{number}{}", column.to_lowercase());
        }
        format!("{}.{number}{extension}", column_prefix(column))
    };
    media.iter().enumerate().map(name).collect()
}

/// Replaces the media in a value by field names.
pub(super) fn put_names(cell: &mut Cell, names: &[String]) {
    match cell {
        Cell::Medium(number) => {
            *cell = names.get(*number).map_or(Cell::Null, |name| Cell::Text(name.clone()));
        }
        Cell::List(values) => values.iter_mut().for_each(|value| put_names(value, names)),
        Cell::Object(values) => values.iter_mut().for_each(|(_, value)| put_names(value, names)),
        _ => {}
    }
}

/// Returns the column with the media that documents refer to, per modality.
fn primary_column(media: &[RowMedium], modality: Modality) -> Option<&str> {
    let of_modality =
        || media.iter().filter(|medium| extension_modality(&medium.extension) == Some(modality));
    let is_there = |column: &&&str| of_modality().any(|medium| medium.column == ***column);
    if let Some(known) = MEDIA_COLUMNS[modality as usize].iter().find(is_there) {
        return Some(known);
    }
    let first = &of_modality().next()?.column;
    of_modality().all(|medium| medium.column == *first).then_some(first)
}

/// Returns a column name in the form of an extension.
pub(super) fn column_prefix(column: &str) -> String {
    let letter = |letter: char| if letter.is_alphanumeric() || letter == '-' { letter } else { '_' };
    column.to_lowercase().chars().map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::media::Content;

    fn names(media: &[(&str, &str)]) -> Vec<String> {
        let medium = |(column, extension): &(&str, &str)| RowMedium {
            column: (*column).to_owned(),
            extension: (*extension).to_owned(),
            content: Content::File(String::new()),
        };
        field_names(&media.iter().map(medium).collect::<Vec<_>>())
    }

    #[test]
    fn media_are_numbered_within_their_modality() {
        assert_eq!(names(&[("image", "jpg")]), ["jpg"]);
        assert_eq!(names(&[("images", "jpg"), ("images", "png")]), ["0.jpg", "1.png"]);
        assert_eq!(names(&[("image", "jpg"), ("audio", "wav")]), ["jpg", "wav"]);
        assert_eq!(names(&[("photo", "jpg"), ("photo", "jpg")]), ["0.jpg", "1.jpg"]);
    }

    #[test]
    fn other_columns_of_a_modality_have_their_name_before_it() {
        assert_eq!(names(&[("mask", "png"), ("image", "png")]), ["mask.png", "png"]);
        assert_eq!(names(&[("Left Eye", "jpg"), ("right", "jpg")]), ["left_eye.jpg", "right.jpg"]);
        assert_eq!(names(&[("features", "npy"), ("npy", "npy")]), ["features.npy", "npy"]);
        assert_eq!(names(&[("jpeg", "jpg"), ("seg", "png"), ("PNG", "png")]), ["jpeg", "seg.png", "png"]);
    }
}
