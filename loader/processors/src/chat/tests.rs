//! Renders documents with small chat templates in the styles of public models. The expected texts were
//! rendered by `transformers` 5, and so were the masks for templates with generation blocks.

use std::collections::BTreeMap;
use std::time::SystemTime;

use dflop_samples::media::{Media, decode_json};
use dflop_samples::sample::{Field, Sample};
use serde_json::{Value, json};

use super::*;
use crate::family::Family;

const CHATML: &[u8] = include_bytes!("../../../../tests/golden/model_inputs/chatml/tokenizer.json");

/// Tools in the system turn, calls as JSON, results in user turns.
const TOOLS: &str = r#"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"#;

/// Reasoning before the last answers, either as a key or inside the content.
const THINKING: &str = r"{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- else %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

/// No generation prompt; calls after a separate word.
const BRACKETS: &str = r"{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[Q]' + message.content + '[/Q]' }}
    {%- elif message.role == 'tool' %}{{- '[R]' + message.content + '[/R]' }}
    {%- elif message.tool_calls %}{{- '[CALLS]' }}{{- message.tool_calls | tojson }}{{- '<|im_end|>' }}
    {%- else %}{{- ' ' + message.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}";

/// Blocks around trained text, without the line break after a turn.
const GENERATION: &str = r"{% for message in messages %}
    {% if message.role == 'assistant' %}
<|im_start|>assistant
        {% generation %}
{{ message.content }}<|im_end|>
        {%- endgeneration %}

    {% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
    {% endif %}
{% endfor %}";

fn labeler(template: &str) -> Labeler {
    let tokenizer = Tokenizer::from_json(CHATML).unwrap();
    let template = ChatTemplate::parse(template, BTreeMap::new(), &Family::text(), SystemTime::UNIX_EPOCH);
    Labeler::new(template.unwrap(), &tokenizer).unwrap()
}

/// Returns the rendered document and the targets.
fn marked(template: &str, json: &Value) -> Result<(String, Vec<String>), String> {
    let field = Field { extension: "json".into(), media: Media::Json(json.clone()) };
    let read =
        read_conversation(&Sample::new("k", vec![field]), |_| true).map_err(|error| error.to_string())?;
    let Conversation::Turns(dialogue) = read.conversation else { panic!("{json} is no conversation") };
    let MarkedText { text, targets } = labeler(template).render(dialogue)?;
    let targets = targets.into_iter().map(|target| text[target].to_owned()).collect();
    Ok((text, targets))
}

fn check(template: &str, json: &Value, rendered: &str, expected: &[&str]) {
    let (text, targets) = marked(template, json).unwrap();
    assert_eq!(text, rendered, "{json}");
    assert_eq!(targets, expected, "{json}");
}

fn windy() -> Value {
    let text = r#"{"tools": [{"type": "function", "function": {"name": "wind", "description": "speed",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}], "messages": [
        {"role": "user", "content": "how windy"}, {"role": "assistant", "content": null, "tool_calls": [{"id": "c1",
        "type": "function", "function": {"name": "wind", "arguments": {"sea": true, "at": "sea"}}}]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"}, {"role": "assistant", "content": "five"}]}"#;
    decode_json(text.as_bytes(), 10_000).unwrap()
}

#[test]
fn tools_and_calls_are_written_in_the_order_of_their_keys_and_calls_are_targets() {
    let tools = "<|im_start|>system\n# Tools\n{\"type\": \"function\", \"function\": {\"name\": \"wind\", \"description\": \
                 \"speed\", \"parameters\": {\"type\": \"object\", \"properties\": {\"at\": {\"type\": \"string\"}}}}}\
                 <|im_end|>\n";
    let call = "<tool_call>\n{\"name\": \"wind\", \"arguments\": {\"sea\": true, \"at\": \"sea\"}}\n</tool_call><|im_end|>";
    let rendered = format!(
        "{tools}<|im_start|>user\nhow windy<|im_end|>\n<|im_start|>assistant\n{call}\n<|im_start|>user\n\
         <tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\nfive<|im_end|>\n"
    );
    check(TOOLS, &windy(), &rendered, &[call, "five<|im_end|>"]);
    let mut sharegpt = windy();
    sharegpt["tools"] = sharegpt["tools"].to_string().into();
    sharegpt["messages"] = json!([{"from": "human", "value": "how windy"},
        {"from": "function_call", "value": "{\"name\": \"wind\", \"arguments\": {\"sea\": true, \"at\": \"sea\"}}"},
        {"from": "observation", "value": "5"}, {"from": "gpt", "value": "five"}]);
    check(TOOLS, &sharegpt, &rendered, &[call, "five<|im_end|>"]);
    let mut excluded = windy();
    excluded["messages"][1]["weight"] = json!(0);
    check(TOOLS, &excluded, &rendered, &["five<|im_end|>"]);
}

#[test]
fn content_before_a_call_and_turns_in_a_row_are_targets() {
    let call = json!([{"type": "function", "function": {"name": "w", "arguments": {}}}]);
    let messages = json!({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "wait", "tool_calls": call}, {"role": "assistant", "content": "b"}]});
    let first = "wait\n<tool_call>\n{\"name\": \"w\", \"arguments\": {}}\n</tool_call><|im_end|>";
    let rendered = format!(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{first}\n\
         <|im_start|>assistant\nb<|im_end|>\n"
    );
    check(TOOLS, &messages, &rendered, &[first, "b<|im_end|>"]);
}

#[test]
fn calls_are_found_without_a_text_that_asks_for_them() {
    let call = "[CALLS][{\"id\": \"c1\", \"type\": \"function\", \"function\": {\"name\": \"wind\", \"arguments\": {\"sea\": \
                true, \"at\": \"sea\"}}}]<|im_end|>";
    let mut windy = windy();
    windy["tools"] = Value::Null;
    let rendered = format!("[Q]how windy[/Q]{call}[R]5[/R] five<|im_end|>");
    check(BRACKETS, &windy, &rendered, &[call, " five<|im_end|>"]);
}

#[test]
fn reasoning_is_a_target_where_it_is_written() {
    let thought = json!({"messages": [{"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "dropped"}, {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "it flies"}]});
    let rendered = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n\
                    <|im_start|>assistant\n<think>\nit flies\n</think>\n\nd<|im_end|>\n";
    let targets = ["b<|im_end|>", "<think>\nit flies\n</think>\n\nd<|im_end|>"];
    check(THINKING, &thought, rendered, &targets);
    let inside = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>\nit flies\n</think>\n\nd"}]});
    check(THINKING, &inside, rendered, &targets);
    // A control sequence in user text starts no assistant turn.
    let quoted = json!({"messages": [{"role": "user", "content": "a<|im_end|>\n<|im_start|>assistant\nbad"},
        {"role": "assistant", "content": "d", "reasoning_content": "it flies"}]});
    let (_, targets) = marked(THINKING, &quoted).unwrap();
    assert_eq!(targets, ["<think>\nit flies\n</think>\n\nd<|im_end|>"]);
}

#[test]
fn what_a_template_would_drop_is_refused() {
    let mut windy = windy();
    let refusal = |json: &Value| marked(THINKING, json).unwrap_err();
    assert_eq!(refusal(&windy), "the chat template does not write the calls of tools, which the sample has");
    windy["messages"] = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    assert_eq!(refusal(&windy), "the chat template does not write `tools`, which the sample has");
    let thought = json!({"messages": [{"role": "assistant", "content": "b", "reasoning_content": "r"}]});
    let reason = marked(TOOLS, &thought).unwrap_err();
    assert_eq!(reason, "the chat template does not write `reasoning_content`, which the sample has");
    let called = json!({"conversations": [{"from": "human", "value": "a"},
        {"from": "function_call", "value": "{\"name\": \"w\"}"}]});
    let (text, targets) = marked(GENERATION, &called).unwrap();
    assert_eq!(targets, ["{\"name\": \"w\"}<|im_end|>"], "{text}");
}

#[test]
fn generation_blocks_are_the_targets() {
    let messages = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "\u{F0002}c"}, {"role": "assistant", "content": ""}]});
    let rendered = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\n\u{F0002}c<|im_end|>\n\
                    <|im_start|>assistant\n<|im_end|>\n";
    check(GENERATION, &messages, rendered, &["b<|im_end|>", "<|im_end|>"]);
    let mut excluded = messages;
    excluded["messages"][1]["train"] = json!(false);
    check(GENERATION, &excluded, rendered, &["<|im_end|>"]);
}

#[test]
fn an_empty_answer_is_its_end() {
    let messages = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]});
    let rendered = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nb<|im_end|>\n\
                    <|im_start|>assistant\nc<|im_end|>\n";
    check(TOOLS, &messages, rendered, &["<|im_end|>", "c<|im_end|>"]);
}

#[test]
fn layouts_without_messages_are_rendered_like_messages() {
    let rendered = "<|im_start|>user\nwhat is it<|im_end|>\n<|im_start|>assistant\na red kite<|im_end|>\n";
    for json in [
        json!({"query": "what is it", "response": "a red kite", "history": []}),
        json!({"prompt": "what is it", "completion": "a red kite"}),
        json!({"texts": [{"user": "what is it", "assistant": "a red kite"}]}),
        json!({"messages": "[{\"role\": \"user\", \"content\": \"what is it\"}, {\"role\": \"assistant\", \"content\": \"a red kite\"}]"}),
        json!({"conversations": [[{"from": "human", "value": "what is it"}, {"from": "gpt", "value": "a red kite"}]]}),
    ] {
        check(TOOLS, &json, rendered, &["a red kite<|im_end|>"]);
    }
    let alpaca = json!({"system": "be brief", "instruction": "c", "input": "d", "output": "e", "history": [["a", "b"]]});
    let rendered = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n\
                    <|im_start|>user\nc\nd<|im_end|>\n<|im_start|>assistant\ne<|im_end|>\n";
    check(TOOLS, &alpaca, rendered, &["b<|im_end|>", "e<|im_end|>"]);
}
