use super::*;
use crate::media::{LONE_SURROGATE, Modality};
use serde_json::json;

/// Formats turns as `role: content`, targets with a star, message keys in braces; other text in quotes.
fn read(json: &Value) -> Result<String, String> {
    let layout = Layout::of(json).ok_or("no text")?;
    let parts = |parts: &[UnplacedPart<'_>]| {
        let part = |part: &UnplacedPart<'_>| match part {
            UnplacedPart::Text(text) => text.to_string(),
            UnplacedPart::Media(modality, name) => {
                format!(
                    "<{}{}>",
                    modality.name(),
                    name.as_ref().map_or(String::new(), |name| format!(" {name}"))
                )
            }
        };
        parts.iter().map(part).collect::<String>()
    };
    let turn = |turn: &Turn<'_>| {
        let keys: Vec<String> = turn.keys().map(|(key, value)| format!("{key}={value}")).collect();
        let keys = if keys.is_empty() { String::new() } else { format!(" {{{}}}", keys.join(", ")) };
        let star = if turn.is_target { "*" } else { "" };
        format!("{}{star}: {}{keys}", turn.role, parts(&turn.content))
    };
    Ok(match layout.read(json, &mut Unread::default())? {
        Text::Dialogue(dialogue) => {
            let variables = dialogue.variables.iter().map(|(name, value)| format!("{name}={value}"));
            dialogue.turns.iter().map(turn).chain(variables).collect::<Vec<_>>().join(" | ")
        }
        Text::Content(content) => format!("[{}]", parts(&content)),
        Text::Caption(content) => format!("'{}'", parts(&content)),
    })
}

fn check(table: impl IntoIterator<Item = (Value, &'static str)>) {
    for (json, expected) in table {
        assert_eq!(read(&json).as_deref(), Ok(expected), "{json}");
    }
}

fn refused(table: impl IntoIterator<Item = (Value, &'static str)>) {
    for (json, reason) in table {
        let found = read(&json).unwrap_err();
        assert!(found.contains(reason), "{json}: {found}");
    }
}

fn unread(json: &Value) -> Vec<(String, String)> {
    let mut unread = Unread::listed();
    Layout::of(json).unwrap().read(json, &mut unread).unwrap();
    unread.into_parts()
}

const ASKED: &str = "user: what is it | assistant*: a red kite";

#[test]
fn turns_are_read_under_every_known_name() {
    let messages =
        json!([{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a red kite"}]);
    let sharegpt = json!([{"from": "human", "value": "what is it"}, {"from": "gpt", "value": "a red kite"}]);
    check([
        (json!({"messages": messages.clone()}), ASKED),
        (json!({"messages": messages.to_string()}), ASKED),
        (json!({"conversation": messages.clone()}), ASKED),
        (json!({"conversations": sharegpt.clone()}), ASKED),
        (json!({"conversations": [sharegpt.clone()]}), ASKED),
        (json!({"conversations": {"from": ["human", "gpt"], "value": ["what is it", "a red kite"]}}), ASKED),
        (json!({"conversation": ["what is it", "a red kite"]}), ASKED),
        (json!({"conversation": [["what is it", "a red kite"]]}), ASKED),
        (json!({"conversation": [{"human": "what is it", "assistant": "a red kite"}]}), ASKED),
        (json!({"conversations": [{"user": "what is it"}, {"assistant": "a red kite"}]}), ASKED),
        (json!({"texts": [{"user": "what is it", "assistant": "a red kite", "source": "VQAv2"}]}), ASKED),
        (json!({"texts": [{"question": "what is it", "answer": "a red kite"}]}), ASKED),
        (json!({"dialogue": messages.clone(), "id": 3}), ASKED),
        (messages.clone(), ASKED),
    ]);
    assert_eq!(read(&json!({"chat": messages.clone(), "other": messages})), Err("no text".to_owned()));
    assert_eq!(read(&json!({"texts": ["a", "b"], "width": 3})), Err("no text".to_owned()));
}

#[test]
fn roles_have_the_names_of_chat_templates() {
    check([
        (
            json!({"conversations": [{"from": "Human", "value": "a"}, {"from": "GPT", "value": "b"},
                {"from": "observation", "value": "c"}, {"from": "bot", "value": "d"}]}),
            "user: a | assistant*: b | tool: c | assistant*: d",
        ),
        (
            json!({"messages": [{"role": "developer", "content": "a"}, {"role": "prompter", "content": "b"},
                {"role": "model", "content": "c"}]}),
            "developer: a | user: b | assistant*: c",
        ),
    ]);
    refused([
        (json!({"messages": [{"content": "x"}]}), "turn 0: a role is required"),
        (json!({"messages": [{"role": "user"}]}), "turn 0: its content must be a string or a list of parts"),
        (json!({"messages": [3]}), "turn 0: it must be an object"),
        (json!({"messages": "[{'role': 'user'}]"}), "`messages` is a string that is not JSON"),
        (
            json!({"messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]}),
            "2 conversations",
        ),
    ]);
}

#[test]
fn what_stands_beside_the_turns_changes_the_prompt() {
    let turns = json!([{"from": "human", "value": "what is it"}, {"from": "gpt", "value": "a red kite"}]);
    let tool = json!({"type": "function", "function": {"name": "wind", "a": 1}});
    check([
        (
            json!({"system": "be brief", "conversations": turns.clone()}),
            "system: be brief | user: what is it | assistant*: a red kite",
        ),
        (
            json!({"system_prompt": "be brief", "query": "what is it", "response": "a red kite"}),
            "system: be brief | user: what is it | assistant*: a red kite",
        ),
        (json!({"system": "", "tools": "", "conversations": turns.clone()}), ASKED),
        (
            json!({"conversations": turns.clone(), "tools": [tool.clone()]}),
            r#"user: what is it | assistant*: a red kite | tools=[{"type":"function","function":{"name":"wind","a":1}}]"#,
        ),
        (
            json!({"conversations": turns.clone(), "tools": json!([tool.clone()]).to_string()}),
            r#"user: what is it | assistant*: a red kite | tools=[{"type":"function","function":{"name":"wind","a":1}}]"#,
        ),
        (
            json!({"conversations": turns.clone(), "functions": [{"name": "wind", "a": 1}]}),
            r#"user: what is it | assistant*: a red kite | tools=[{"type":"function","function":{"name":"wind","a":1}}]"#,
        ),
        (
            json!({"conversations": turns.clone(), "documents": [{"title": "t"}], "chat_template_kwargs": {"enable_thinking": false}}),
            r#"user: what is it | assistant*: a red kite | documents=[{"title":"t"}] | enable_thinking=false"#,
        ),
    ]);
    refused([
        (json!({"conversations": turns.clone(), "tools": "no JSON"}), "`tools` is a string that is not JSON"),
        (json!({"conversations": turns.clone(), "tools": 3}), "`tools` must be a list"),
        (json!({"conversations": turns, "system": ["a"]}), "`system` must be a text"),
    ]);
}

#[test]
fn calls_and_reasoning_keep_their_keys_in_order() {
    check([
        (
            json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "c", "function": {"name": "w", "arguments": {"b": 1, "a": 2}}}]},
                {"role": "tool", "content": "5", "tool_call_id": "c"}]}),
            r#"assistant*:  {tool_calls=[{"id":"c","function":{"name":"w","arguments":{"b":1,"a":2}}}]} | tool: 5 {tool_call_id="c"}"#,
        ),
        (
            json!({"conversations": [{"from": "function_call", "value": "{\"name\": \"w\", \"arguments\": {\"b\": 1, \"a\": 2}}"}]}),
            r#"assistant*:  {tool_calls=[{"type":"function","function":{"name":"w","arguments":{"b":1,"a":2}}}]}"#,
        ),
        (
            json!({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "w", "arguments": "{}"}},
                {"role": "function", "name": "w", "content": "5"}]}),
            r#"assistant*:  {tool_calls=[{"type":"function","function":{"name":"w","arguments":"{}"}}]} | tool: 5 {name="w"}"#,
        ),
        (
            json!({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": []}]}),
            r#"assistant*: a {reasoning_content="r", tool_calls=[]}"#,
        ),
        (
            json!({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "a"}]}]}),
            r#"assistant*: a {reasoning_content="r"}"#,
        ),
        (
            json!({"question": "q", "reasoning_content": "r", "answer": "a"}),
            r#"user: q | assistant*: a {reasoning_content="r"}"#,
        ),
        (
            json!({"messages": [{"role": "assistant", "content": null, "refusal": "no"}]}),
            r#"assistant*: no {refusal="no"}"#,
        ),
    ]);
    refused([
        (
            json!({"conversations": [{"from": "function_call", "value": "wind at sea"}]}),
            "a call of a tool must be JSON",
        ),
        (json!({"messages": [{"role": "assistant", "content": null}]}), "its content must be"),
    ]);
}

#[test]
fn flags_take_turns_out_of_the_targets() {
    let turn = |flag: &str, value: Value| json!({"role": "assistant", "content": "a", flag: value});
    check([
        (
            json!({"messages": [turn("weight", json!(0)), turn("weight", json!(1))]}),
            "assistant: a {weight=0} | assistant*: a {weight=1}",
        ),
        (
            json!({"messages": [turn("train", json!(false)), turn("loss", json!(true))]}),
            "assistant: a {train=false} | assistant*: a {loss=true}",
        ),
        (json!({"texts": [{"user": "q", "assistant": "a", "loss": false}]}), "user: q | assistant: a"),
    ]);
    refused([
        (
            json!({"messages": [turn("is_masked", json!(true))]}),
            "turn 0: `is_masked` looks like a training flag",
        ),
        (json!({"messages": [turn("weight", json!(0.3))]}), "turn 0: `weight` must be"),
    ]);
}

#[test]
fn a_prompt_is_no_target_and_its_completion_is() {
    let prompt = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]);
    check([
        (
            json!({"prompt": prompt.clone(), "completion": [{"role": "assistant", "content": "d"}]}),
            "user: a | assistant: b | user: c | assistant*: d",
        ),
        (
            json!({"prompt": prompt.clone(), "completion": {"role": "assistant", "content": "d"}}),
            "user: a | assistant: b | user: c | assistant*: d",
        ),
        (
            json!({"prompt": prompt.clone(), "response": "d"}),
            "user: a | assistant: b | user: c | assistant*: d",
        ),
        (json!({"prompt": "what is it", "completion": "a red kite"}), ASKED),
    ]);
    assert_eq!(read(&json!({"prompt": prompt})), Err("no text".to_owned()));
    refused([
        (
            json!({"prompt": "a", "chosen": "b", "rejected": "c"}),
            "`chosen` and `rejected` are data for preference",
        ),
        (
            json!({"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]}),
            "`chosen` and",
        ),
        (json!({"prompt": "a", "completion": "b", "label": false}), "`label` is true or false"),
    ]);
    check([
        (json!({"prompt": "what is it", "completion": "a red kite", "rejected": "no"}), ASKED),
        (json!({"question": "what is it", "answer": "a red kite", "label": true}), ASKED),
    ]);
}

#[test]
fn questions_and_answers_are_read_under_every_known_pair() {
    for [asked, answered] in [
        ["instruction", "output"],
        ["instruction", "response"],
        ["query", "response"],
        ["query", "answer"],
        ["question", "answer"],
        ["question", "multiple_choice_answer"],
        ["prompt", "response"],
        ["prompt", "completion"],
        ["problem", "solution"],
        ["inputs", "targets"],
        ["input", "output"],
        ["user", "assistant"],
        ["human", "gpt"],
    ] {
        check([(json!({asked: "what is it", answered: "a red kite", "id": 1}), ASKED)]);
    }
    check([
        (
            json!({"instruction": "name it", "input": "it flies", "output": "a kite"}),
            "user: name it\nit flies | assistant*: a kite",
        ),
        (
            json!({"instruction": "name it", "input": "", "output": "a kite"}),
            "user: name it | assistant*: a kite",
        ),
        (
            json!({"instruction": "", "input": "it flies", "output": "a kite"}),
            "user: it flies | assistant*: a kite",
        ),
        (
            json!({"instruction": "name it", "context": "it flies", "response": "a kite"}),
            "user: name it\nit flies | assistant*: a kite",
        ),
        (
            json!({"query": "c", "response": "d", "history": [["a", "b"]], "system": "s"}),
            "system: s | user: a | assistant*: b | user: c | assistant*: d",
        ),
        (
            json!({"query": "c", "response": "d", "history": "[[\"a\", \"b\"]]"}),
            "user: a | assistant*: b | user: c | assistant*: d",
        ),
        (json!({"problem": "p", "solution": "long", "answer": "4"}), "user: p | assistant*: long"),
        (json!({"question": "q", "answer": ""}), "user: q | assistant*: "),
    ]);
    assert_eq!(read(&json!({"input": "a/0.png", "output": "a/1.png"})), Err("no text".to_owned()));
    assert_eq!(read(&json!({"question": "what is it"})), Err("no text".to_owned()));
}

#[test]
fn the_most_frequent_of_several_answers_counts() {
    check([
        (json!({"question": "q", "answers": ["kite", "a kite"]}), "user: q | assistant*: kite"),
        (json!({"question": "q", "answers": ["a", "b", "b"]}), "user: q | assistant*: b"),
        (
            json!({"question": "q", "answers": [{"answer": "x", "id": 1}, {"answer": "y"}, {"answer": "y"}]}),
            "user: q | assistant*: y",
        ),
        (
            json!({"question": "q", "multiple_choice_answer": "m", "answers": [{"answer": "x"}]}),
            "user: q | assistant*: m",
        ),
        (
            json!({"question": "q", "context": "c", "answers": {"text": ["t"], "answer_start": [3]}}),
            "user: q\nc | assistant*: t",
        ),
        (json!({"query": "q", "label": ["14"], "human_or_machine": 0}), "user: q | assistant*: 14"),
        (json!({"question": "q", "label": "kite"}), "user: q | assistant*: kite"),
        (json!({"question": "q", "answer": 3}), "user: q | assistant*: 3"),
    ]);
    refused([
        (json!({"question": "q", "answers": {"text": []}}), "`answers` is empty"),
        (json!({"question": "q", "answer": {"id": 3}}), "`answer` is an object without"),
        (json!({"question": "q", "answer": true}), "`answer` must be a text"),
        (
            json!({"question": "q", "choices": ["a", "b"], "answer": 0}),
            "`choices` beside `question` is not read",
        ),
    ]);
    assert_eq!(read(&json!({"question": "q", "label": 3})), Err("no text".to_owned()));
}

#[test]
fn captions_are_texts_lists_and_objects() {
    check([
        (json!({"caption": "a red kite"}), "'a red kite'"),
        (json!({"caption": ["a red kite", "a kite"]}), "'a red kite'"),
        (json!({"captions": [{"caption": "a red kite", "id": 3}]}), "'a red kite'"),
        (json!({"caption": {"text": "a red kite", "score": 0.3}}), "'a red kite'"),
        (json!({"caption": {"long": "a red kite"}}), "'a red kite'"),
        (json!({"caption": null, "text": ["a red kite"]}), "'a red kite'"),
        (json!({"transcript": "a red kite"}), "'a red kite'"),
        (json!({"vlm_caption": "a red kite", "url": "x"}), "'a red kite'"),
        (json!({"text": "<image>a kite"}), "'<image>a kite'"),
    ]);
    refused([(
        json!({"caption": {"short": "a", "long": "b"}}),
        "`caption` holds several texts (short, long)",
    )]);
    for json in
        [json!({"caption": [1, 2]}), json!({"re_caption": "a", "org_caption": "b"}), json!({"caption": ""})]
    {
        assert_eq!(read(&json), Err("no text".to_owned()), "{json}");
    }
}

#[test]
fn content_lists_text_and_media_in_order() {
    check([
        (json!({"content": ["a ", {"type": "image"}, {"type": "text", "text": "b"}]}), "[a <image>b]"),
        (json!({"texts": ["a", null], "images": [null, "0.jpg"]}), "[a<image>]"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "0.png"}}, {"type": "text", "text": "a"}]}]}),
            "user: <image 0.png>a",
        ),
    ]);
    refused([
        (
            json!({"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
            "turn 0: unknown content part of type `document`",
        ),
        (json!({"messages": [{"role": "user", "content": [{"type": "x".repeat(1000)}]}]}), "x…`"),
    ]);
    assert_eq!(Layout::of(&json!({"content": []})), None);
    let part = json!({"type": "image", "image": {"path": "0.png"}});
    assert_eq!(parts::media_name(&part), Some((Modality::Image, Some("0.png"))));
}

#[test]
fn half_a_character_is_refused_where_it_is_read() {
    let half = format!("a{LONE_SURROGATE}");
    refused([
        (json!({"caption": half}), "the text `a\u{FFFD}` has a lone surrogate"),
        (json!({"messages": [{"role": "user", "content": half}]}), "turn 0: the text"),
        (json!({"question": "q", "answer": half}), "lone surrogate"),
    ]);
    check([(json!({"caption": "a kite", "url": half}), "'a kite'")]);
}

#[test]
fn parts_that_nobody_reads_are_listed_once_and_empty_ones_never() {
    let json = json!({"id": 7, "url": null, "tags": [], "similarity": 0.31, "image": "0.png", "system": "s", "messages": [
        {"role": "user", "content": "a", "time": 1}, {"role": "assistant", "content": "b", "time": 2, "weight": 1},
        {"role": "user", "content": [{"type": "image", "image": "0.png", "max_pixels": 9}]}]});
    let expected = [
        ("messages[].time", "1"),
        ("messages[].content[].max_pixels", "9"),
        ("id", "7"),
        ("similarity", "0.31"),
    ];
    assert_eq!(unread(&json), expected.map(|(part, example)| (part.to_owned(), example.to_owned())));
    assert!(unread(&json!({"question": "q", "answer": "a", "history": [], "image": "0.png"})).is_empty());
    assert_eq!(
        unread(&json!({"system": "a", "messages": [{"role": "system", "content": "b"}]}))[0].0,
        "system"
    );
}

fn read_flags(turn: &Value, is_assistant: bool) -> Result<bool, String> {
    is_target(turn.as_object().unwrap(), is_assistant)
}

#[test]
fn known_flags_are_on_or_off() {
    for (turn, expected) in [
        (json!({"content": "x"}), true),
        (json!({"weight": 0}), false),
        (json!({"weight": 1, "loss": null}), true),
        (json!({"weight": 1.0, "train": false}), false),
        (json!({"training": true}), true),
        (json!({"loss": false}), false),
        (json!({"loss_scale": 0.0}), false),
    ] {
        assert_eq!(read_flags(&turn, true), Ok(expected), "{turn}");
    }
    assert_eq!(read_flags(&json!({"weight": 1, "loss": true}), false), Ok(false));
    assert_eq!(read_flags(&json!({"train": false}), false), Ok(false));
}

#[test]
fn flags_that_are_not_understood_are_refused_by_name() {
    for (turn, is_assistant, reason) in [
        (json!({"weight": 0.5}), true, "`weight` must be true or false, 1 or 0, found 0.5"),
        (json!({"train": "no"}), true, "`train` must be true or false, 1 or 0, found \"no\""),
        (json!({"train": true}), false, "`train` is true, but only turns of the assistant"),
        (json!({"is_train": true}), true, "`is_train` looks like a training flag"),
        (json!({"mask": 1}), true, "`mask` looks like a training flag"),
        (json!({"isTrainable": false}), true, "`isTrainable` looks like a training flag"),
        (json!({"train_detail": [{"begin_offset": 0}]}), true, "`train_detail` looks like"),
    ] {
        let found = read_flags(&turn, is_assistant).unwrap_err();
        assert!(found.starts_with(reason), "{turn}: {found}");
    }
    assert_eq!(
        read_flags(&json!({"toxic": true, "turn": 3, "mask": null, "constraints": 1}), true),
        Ok(true)
    );
}
