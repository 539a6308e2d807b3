use super::*;
use bytes::Bytes;

const JPEG: &[u8] = b"\xff\xd8\xff\xe0 a kite";
const PNG: &[u8] = b"\x89PNG\r\n\x1a\n a mask";

fn text(text: &str) -> Cell {
    Cell::Text(text.to_owned())
}

fn bytes(bytes: &'static [u8]) -> Cell {
    Cell::Bytes(Bytes::from_static(bytes))
}

fn object(values: impl IntoIterator<Item = (&'static str, Cell)>) -> Cell {
    Cell::Object(values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

fn image(content: &'static [u8], path: &str) -> Cell {
    object([("bytes", bytes(content)), ("path", text(path))])
}

fn columns(values: impl IntoIterator<Item = (&'static str, Cell)>) -> Columns {
    values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn map(pairs: &[(&str, &str)]) -> ColumnMap {
    ColumnMap::new(pairs.iter().map(|(column, field)| ((*column).to_owned(), (*field).to_owned()))).unwrap()
}

/// Fields as `extension=content`, then the document.
fn shown(sample: RowSample) -> (Vec<String>, String) {
    let field = |(extension, content): (String, Content)| match content {
        Content::Bytes(bytes) if bytes == JPEG => format!("{extension}=JPEG"),
        Content::Bytes(bytes) if bytes == PNG => format!("{extension}=PNG"),
        Content::Bytes(bytes) => format!("{extension}={}", String::from_utf8_lossy(&bytes)),
        Content::File(path) => format!("{extension}@{path}"),
    };
    (sample.fields.into_iter().map(field).collect(), String::from_utf8(sample.json).unwrap())
}

fn made(
    values: impl IntoIterator<Item = (&'static str, Cell)>,
    pairs: &[(&str, &str)],
) -> (Vec<String>, String) {
    shown(row_sample(columns(values), &RowRules::new(&map(pairs)), None).unwrap())
}

fn refused(values: impl IntoIterator<Item = (&'static str, Cell)>, pairs: &[(&str, &str)]) -> String {
    row_sample(columns(values), &RowRules::new(&map(pairs)), None).unwrap_err()
}

#[test]
fn media_become_fields_and_the_document_names_them_where_they_were() {
    let images = Cell::List(vec![image(JPEG, "a/1.jpg"), Cell::Null, bytes(PNG)]);
    let (fields, json) = made([("images", images), ("score", Cell::Float(0.5))], &[]);
    assert_eq!(fields, ["0.jpg=JPEG", "1.png=PNG"]);
    assert_eq!(json, r#"{"images":[{"file":"0.jpg","path":"a/1.jpg"},null,"1.png"],"score":0.5}"#);
}

#[test]
fn parts_of_messages_hold_media_as_bytes_or_urls() {
    let url = "data:image/jpeg;base64,/9j/4CBhIGtpdGU=";
    let part = object([("type", text("image_url")), ("image_url", object([("url", text(url))]))]);
    let nested = object([("type", text("image")), ("image", image(PNG, "m.png"))]);
    let turn = object([("role", text("user")), ("content", Cell::List(vec![part, nested]))]);
    let (fields, json) = made([("messages", Cell::List(vec![turn]))], &[]);
    assert_eq!(fields, ["0.jpg=JPEG", "1.png=PNG"]);
    assert_eq!(
        json,
        r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"0.jpg"}},{"type":"image","image":{"url":"1.png","path":"m.png"}}]}]}"#
    );
}

#[test]
fn files_are_read_where_a_row_has_paths_only() {
    let stored = object([("bytes", Cell::Null), ("path", text("x/1.JPG"))]);
    assert_eq!(made([("image", stored)], &[]).0, ["jpg@x/1.JPG"]);
    assert_eq!(made([("file_name", text("2.png"))], &[]).0, ["png@2.png"]);
    let empty = object([("bytes", Cell::Null), ("path", Cell::Null)]);
    let (fields, json) = made([("image", empty), ("text", text("none"))], &[]);
    assert_eq!((fields.len(), json.as_str()), (0, r#"{"image":null,"text":"none"}"#));
    let url = refused([("image", text("https://host/a.jpg"))], &[]);
    assert!(url.contains("column `image`: `https://host/a.jpg` is a URL"), "{url}");
}

#[test]
fn long_values_are_cut_in_messages() {
    let long = "not a path at all, with spaces ".repeat(10_000);
    let reason = refused([("image", text(&long))], &[]);
    assert!(reason.len() < 300 && reason.contains("column `image`"), "{reason}");
}

#[test]
fn labels_that_are_declared_or_lie_next_to_media_become_classes() {
    let label = ("label", Cell::Int(3));
    let (fields, json) = made([("image", bytes(JPEG)), label.clone()], &[]);
    assert_eq!(fields, ["jpg=JPEG", "cls=3"]);
    assert_eq!(json, r#"{"image":"jpg","label":3}"#);
    assert_eq!(made([("text", text("x")), label], &[]).0, [] as [&str; 0]);
    assert_eq!(made([("image", bytes(JPEG)), ("label", Cell::Int(-1))], &[]).0, ["jpg=JPEG"]);
    let mut rules = RowRules::default();
    rules.declare(
        r#"{"info": {"features": {"breed": {"names": ["corgi", "husky"], "_type": "ClassLabel"},
            "photo": {"_type": "Image"}, "views": {"feature": {"_type": "Image"}, "_type": "List"}}}}"#,
    );
    let row = columns([("photo", text("a.jpg")), ("breed", Cell::Int(1))]);
    assert_eq!(shown(row_sample(row, &rules, None).unwrap()).0, ["jpg@a.jpg", "cls=1"]);
    assert!(rules.is_media("views") && rules.label_classes() == ["corgi", "husky"]);
}

#[test]
fn questions_and_answers_keep_their_columns_for_the_reader_of_documents() {
    for pair in
        [["prompt", "response"], ["prompt", "completion"], ["query", "response"], ["problem", "solution"]]
    {
        let (fields, json) = made(pair.map(|column| (column, text("Yes."))), &[]);
        let expected = format!(r#"{{"{}":"Yes.","{}":"Yes."}}"#, pair[0], pair[1]);
        assert_eq!((fields.len(), json), (0, expected));
    }
    let turn = |role: &str, content: &str| object([("role", text(role)), ("content", text(content))]);
    let prompt = Cell::List(vec![turn("user", "Hi?")]);
    let (_, json) = made([("prompt", prompt), ("completion", text("Yes."))], &[]);
    assert_eq!(json, r#"{"prompt":[{"role":"user","content":"Hi?"}],"completion":"Yes."}"#);
}

#[test]
fn an_answer_is_no_class_and_a_question_about_a_recording_has_no_transcript() {
    let chart = [("image", bytes(JPEG)), ("query", text("how many")), ("label", text("14"))];
    assert_eq!(made(chart, &[]).0, ["jpg=JPEG"]);
    let audio = object([("bytes", bytes(b"fLaC...")), ("path", Cell::Null)]);
    let asked =
        [("audio", audio), ("question", text("who")), ("answer", text("a man")), ("text", text("hello"))];
    assert_eq!(made(asked, &[]).0, ["flac=fLaC..."]);
}

#[test]
fn a_mapping_makes_keys_columns_and_fields() {
    let row = || {
        [("uid", Cell::Int(7)), ("chat", Cell::List(vec![])), ("photo", bytes(JPEG)), ("alt", text("a kite"))]
    };
    let pairs = [("uid", "__key__"), ("chat", "messages"), ("photo", "view.jpg"), ("alt", "txt")];
    let (fields, json) = made(row(), &pairs);
    assert_eq!(fields, ["view.jpg=JPEG", "txt=a kite"]);
    assert_eq!(json, r#"{"messages":[]}"#);
    assert_eq!(row_id(&columns(row()), &map(&pairs)).as_deref(), Some("7"));
    let reason = refused([("tags", Cell::List(vec![text("a")]))], &[("tags", "txt")]);
    assert_eq!(reason, "column `tags` holds a list, which cannot be the field `txt`");
    let tags = made([("tags", Cell::List(vec![text("a")]))], &[("tags", "tags.json")]);
    assert_eq!(tags.0, [r#"tags.json=["a"]"#]);
}

#[test]
fn a_mapping_without_sense_is_refused() {
    for (pairs, expected) in [
        (vec![("a", "txt"), ("a", "cls")], "mapped twice"),
        (vec![("a", "")], "empty name"),
        (vec![("a", "json")], "meta.json"),
        (vec![("a", "TXT")], "lower case"),
        (vec![("a", "x/y")], "extension"),
    ] {
        let pairs = pairs.into_iter().map(|(column, field)| (column.to_owned(), field.to_owned()));
        assert!(ColumnMap::new(pairs).unwrap_err().to_string().contains(expected), "{expected}");
    }
}

#[test]
fn a_document_never_repeats_a_name() {
    let inner = object([("text", text("inner")), ("score", Cell::Int(1))]);
    let (_, json) = made([("text", text("outer")), ("json", inner), ("score", Cell::Int(2))], &[]);
    assert_eq!(json, r#"{"text":"outer","text_":"inner","score":1,"score_":2}"#);
}

#[test]
fn recordings_have_their_transcript_as_text() {
    let audio = object([("bytes", bytes(b"fLaC...")), ("path", Cell::Null)]);
    let (fields, _) = made([("audio", audio), ("sentence", text("hello"))], &[]);
    assert_eq!(fields, ["flac=fLaC...", "txt=hello"]);
}

#[test]
fn rows_keep_their_source_and_say_where_each_column_went() {
    let row = columns([("id", text("a")), ("image", bytes(JPEG)), ("caption", text("a kite"))]);
    let sample = row_sample(row, &RowRules::default(), Some(("data/0.parquet", 12))).unwrap();
    let uses: Vec<(&str, &str)> = sample.uses.iter().map(|(c, f)| (c.as_str(), f.as_str())).collect();
    assert_eq!(uses, [("id", "json"), ("caption", "json"), ("image", "jpg")]);
    let json = String::from_utf8(sample.json).unwrap();
    assert!(json.ends_with(r#""__source__":{"file":"data/0.parquet","row":12}}"#), "{json}");
}

#[test]
fn a_row_without_anything_that_a_loader_knows_is_refused() {
    let reason = refused([("score", Cell::Float(1.0)), ("url", text("x"))], &[]);
    assert!(reason.contains("expected a column for a medium") && reason.contains("--map"), "{reason}");
}

#[test]
fn only_base64_makes_an_entry_of_json_a_row() {
    let base64 = format!("R0lGODlh{}", "QUJD".repeat(40));
    assert!(holds_embedded(&columns([("image", text(&base64))])));
    assert!(holds_embedded(&columns([("image", object([("bytes", text(&base64))]))])));
    assert!(!holds_embedded(&columns([("hash", text(&base64)), ("image", text("a/b.jpg"))])));
}

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
