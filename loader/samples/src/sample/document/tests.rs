use serde_json::json;

use crate::media::RgbImage;
use crate::sample::document::*;

fn sample(fields: Vec<(&str, Media)>) -> Sample {
    let fields = fields.into_iter().map(|(name, media)| Field { extension: name.into(), media }).collect();
    Sample { shard: "s.tar".into(), offset: 512, ..Sample::new("d/kite", fields) }
}

fn text(text: &str) -> Media {
    Media::Text(text.to_owned())
}

fn image() -> Media {
    Media::Image(RgbImage::default())
}

/// Returns content that is the image at this index.
fn placed(at: usize) -> ContentPart<'static> {
    ContentPart::Medium(Modality::Image, at)
}

/// Creates a sample from images with these names, and a document.
fn images(names: &[&'static str], document: Value) -> Sample {
    let images = names.iter().map(|name| (*name, image()));
    sample(images.chain([("json", Media::Json(document))]).collect())
}

fn image_names(sample: &Sample) -> Result<Vec<String>, MediaFault> {
    let media = SampleMedia::from_sample(sample)?;
    Ok(media.images.iter().map(|field| field.extension.to_string()).collect())
}

#[test]
fn without_names_numbers_order_fields_and_else_the_shard_does() {
    let names = |names: &[&'static str]| image_names(&images(names, Value::Null)).unwrap();
    assert_eq!(names(&["0.jpg", "10.jpg", "2.png"]), ["0.jpg", "2.png", "10.jpg"]);
    assert_eq!(names(&["img_10.png", "img_9.png"]), ["img_9.png", "img_10.png"]);
    assert_eq!(names(&["10.left.png", "9.left.png"]), ["9.left.png", "10.left.png"]);
    assert_eq!(names(&["b2.png", "a10.png"]), ["b2.png", "a10.png"]);
    assert_eq!(names(&["right.jpg", "left.jpg", "jpg"]), ["right.jpg", "left.jpg", "jpg"]);
}

#[test]
fn a_document_says_which_images_in_which_order() {
    let stored = ["0.jpg", "1.jpg", "mask.png"];
    let table = [
        (json!({"images": ["1.jpg", "0.jpg"]}), vec!["1.jpg", "0.jpg"]),
        (json!({"image": "1.JPG"}), vec!["1.jpg"]),
        (json!({"images": ["x/kite.1.jpg", "0.jpg", "1.jpg"]}), vec!["1.jpg", "0.jpg", "1.jpg"]),
        (json!({"images": ["coco/000000017.jpg", "coco/b.jpg"]}), vec!["0.jpg", "1.jpg"]),
        (json!({"images": ["coco/a.tif", "coco/b.jpg", "coco/c.bmp"]}), vec!["0.jpg", "1.jpg", "mask.png"]),
        (json!({"image": "a red kite"}), vec!["0.jpg", "1.jpg", "mask.png"]),
        (json!({"image": null, "images": []}), vec!["0.jpg", "1.jpg", "mask.png"]),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image", "image": "1.jpg"}]}]}),
            vec!["1.jpg"],
        ),
    ];
    for (document, expected) in table {
        assert_eq!(image_names(&images(&stored, document.clone())).unwrap(), expected, "{document}");
    }
    assert_eq!(image_names(&images(&["jpg"], json!({"image": "a/b/c.jpg"}))).unwrap(), ["jpg"]);
}

#[test]
fn a_name_without_a_field_is_a_fault_that_says_where() {
    for document in [
        json!({"images": ["0.jpg", "2.jpg"]}),
        json!({"image": "7.jpg"}),
        json!({"images": ["a.jpg", "b.jpg", "c.jpg"]}),
        json!({"images": ["0.jpg", "notes.txt"]}),
    ] {
        let fault = image_names(&images(&["0.jpg", "1.jpg"], document.clone())).unwrap_err();
        assert_eq!((fault.key.as_str(), fault.offset, fault.shard.as_str()), ("d/kite", 512, "s.tar"));
        assert!(document.to_string().contains(&fault.field), "{fault}");
        assert_eq!(fault.clone().skipped().field, Some(fault.field));
    }
}

#[test]
fn marks_and_parts_stand_for_media_in_order() {
    let marked = json!({"conversations": [
        {"from": "human", "value": "<image>\nthen <image>?"}, {"from": "gpt", "value": "a kite"}]});
    let sample = images(&["0.jpg", "1.jpg"], marked);
    let media = SampleMedia::from_sample(&sample).unwrap();
    let turns = media.turns().unwrap().unwrap();
    let asked = [placed(0), ContentPart::Text("then "), placed(1), ContentPart::Text("?")];
    assert_eq!((turns[0].role, &*turns[0].parts), ("user", &asked[..]));
    assert_eq!((turns[1].role, &*turns[1].parts), ("assistant", &[ContentPart::Text("a kite")][..]));

    let parts = json!({"images": ["0.jpg", "1.jpg"], "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "1.jpg"}}, {"type": "text", "text": "or"}, {"type": "image"}]}]});
    let sample = images(&["0.jpg", "1.jpg"], parts);
    let media = SampleMedia::from_sample(&sample).unwrap();
    let turns = media.turns().unwrap().unwrap();
    assert_eq!(turns[0].parts, [placed(1), ContentPart::Text("or"), placed(0)]);
}

#[test]
fn more_or_fewer_marks_than_media_are_a_fault_with_both_counts() {
    for (names, texts, reason) in [
        (&["jpg"][..], "<image><image>", "2 image placeholders for 1 images"),
        (&["0.jpg", "1.jpg", "2.jpg"], "<image> <image>", "2 image placeholders for 3 images"),
        (&["jpg"], "<image><audio>", "1 audio placeholders for 0 clips"),
        (&["jpg"], "<video>", "1 video placeholders for 0 videos"),
    ] {
        let sample = images(names, json!({"messages": [{"role": "user", "content": texts}]}));
        let fault = SampleMedia::from_sample(&sample).unwrap().turns().unwrap_err();
        assert_eq!((fault.field.as_str(), fault.reason.as_str()), ("json", reason));
    }
}

/// Returns the images in a turn's parts.
fn displayed(names: &[&'static str], parts: &Value) -> Result<Vec<String>, String> {
    let sample = images(names, json!({"messages": [{"role": "user", "content": parts}]}));
    let media = SampleMedia::from_sample(&sample).map_err(|fault| fault.reason)?;
    let turns = media.turns().map_err(|fault| format!("{}: {}", fault.field, fault.reason))?.unwrap();
    let name = |part: &ContentPart<'_>| match part {
        ContentPart::Medium(Modality::Image, at) => Some(media.images[*at].extension.to_string()),
        _ => None,
    };
    Ok(turns[0].parts.iter().filter_map(name).collect())
}

#[test]
fn parts_without_a_name_take_what_no_part_names() {
    let stored = ["0.jpg", "1.jpg", "2.jpg"];
    let named = |name: &str| json!({"type": "image", "image": name});
    let next = json!({"type": "image"});
    let found = |parts: Value| displayed(&stored, &parts);
    let names = |names: [&str; 3]| Ok(names.map(str::to_owned).to_vec());
    assert_eq!(found(json!([named("0.jpg"), next, next])), names(["0.jpg", "1.jpg", "2.jpg"]));
    assert_eq!(found(json!([next, named("kite.0.jpg"), next])), names(["1.jpg", "0.jpg", "2.jpg"]));
    assert_eq!(
        found(json!([named("1.jpg"), named("0.jpg"), named("1.jpg")])),
        names(["1.jpg", "0.jpg", "1.jpg"])
    );
    assert_eq!(found(json!([named("a/x.jpg"), named("a/y.jpg"), named("a/z.jpg")])), names(stored));
    assert_eq!(found(json!([named("0.jpg"), next])), Err("json: 2 image placeholders for 3 images".into()));
    assert_eq!(
        found(json!([named("0.jpg"), named("x.jpg"), next])),
        Err("x.jpg: the sample has no field of this name".into())
    );
    assert_eq!(
        found(json!([{"type": "tool_use"}])),
        Err("json: turn 0: unknown content part of type `tool_use`".into())
    );
}

#[test]
fn a_second_conversation_is_a_fault_and_a_describing_list_is_none() {
    let turns = || Media::Json(json!({"messages": [{"role": "user", "content": "<image>"}]}));
    let twice = sample(vec![("a.json", turns()), ("b.json", turns()), ("jpg", image())]);
    let fault = SampleMedia::from_sample(&twice).unwrap().turns().unwrap_err();
    assert_eq!(
        (fault.field.as_str(), fault.reason.as_str()),
        ("b.json", "only one document may describe a sample, and `a.json` already does")
    );
    let listed = Media::Json(json!({"images": ["jpg"]}));
    let beside = sample(vec![("a.json", listed), ("b.json", turns()), ("jpg", image())]);
    assert_eq!(SampleMedia::from_sample(&beside).unwrap().json_name(), "b.json");
}

#[test]
fn a_question_and_its_answer_are_turns_and_captions_stand_behind_media() {
    let asked = images(&["jpg"], json!({"question": "<image>\nwhat?", "answer": "a kite"}));
    let media = SampleMedia::from_sample(&asked).unwrap();
    let turns = media.turns().unwrap().unwrap();
    assert_eq!((turns[0].role, &*turns[0].parts), ("user", &[placed(0), ContentPart::Text("what?")][..]));
    assert_eq!((turns[1].role, &*turns[1].parts), ("assistant", &[ContentPart::Text("a kite")][..]));
    let caption = sample(vec![("json", Media::Json(json!({"caption": "a kite"}))), ("jpg", image())]);
    let media = SampleMedia::from_sample(&caption).unwrap();
    assert_eq!(media.turns().unwrap(), None);
    assert_eq!(media.parts().unwrap(), [placed(0), ContentPart::Text("a kite")]);
    let behind = sample(vec![
        ("txt", text("hi <audio>")),
        ("wav", Media::Audio(crate::media::Audio::default())),
        ("jpg", image()),
    ]);
    let expected = [placed(0), ContentPart::Text("hi "), ContentPart::Medium(Modality::Audio, 0)];
    assert_eq!(SampleMedia::from_sample(&behind).unwrap().parts().unwrap(), expected);
    let deaf = SampleMedia::for_modalities(&behind, |modality| modality == Modality::Image).unwrap();
    assert_eq!(deaf.parts().unwrap_err().reason, "1 audio placeholders for 0 clips");
}

#[test]
fn texts_and_images_interleave_by_document_or_by_number() {
    let lists = json!({"texts": ["a", null, "b"], "images": [null, "0.jpg", null]});
    let by_list = images(&["0.jpg"], lists);
    let expected = [ContentPart::Text("a"), placed(0), ContentPart::Text("b")];
    assert_eq!(SampleMedia::from_sample(&by_list).unwrap().parts().unwrap(), expected);
    let fields = vec![("0.txt", text("a")), ("1.jpg", image()), ("10.txt", text("c")), ("2.txt", text("b"))];
    let by_number = sample(fields);
    let expected = [ContentPart::Text("a"), placed(0), ContentPart::Text("b"), ContentPart::Text("c")];
    assert_eq!(SampleMedia::from_sample(&by_number).unwrap().parts().unwrap(), expected);
    let as_stored = sample(vec![("wav", Media::Audio(crate::media::Audio::default())), ("txt", text("hi"))]);
    assert_eq!(
        SampleMedia::from_sample(&as_stored).unwrap().parts().unwrap(),
        [ContentPart::Medium(Modality::Audio, 0), ContentPart::Text("hi")]
    );
}

#[test]
fn inline_media_and_urls_without_a_field_are_refused_and_cut() {
    let url = format!("data:image/png;base64,{}", "A".repeat(400_000));
    let part = |url: &str| json!([{"type": "image_url", "image_url": {"url": url}}]);
    for (names, parts, expected) in [
        (&["png"][..], part(&url), "holds a medium inline"),
        (&[], part(&url), "holds a medium inline"),
        (&[], part("https://host/a.png"), "is a URL, nothing is downloaded"),
        (
            &[],
            json!([{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}]),
            "holds its audio inline",
        ),
    ] {
        let reason = displayed(names, &parts).unwrap_err();
        assert!(reason.contains(expected) && reason.chars().count() < 600, "{reason}");
    }
    let column = images(&["png"], json!({"image": url}));
    let fault = image_names(&column).unwrap_err().to_string();
    assert!(fault.contains("holds a medium inline") && fault.chars().count() < 600, "{fault}");
}
