//! The splitter against the regular expressions of the layouts, and every family's names.

use super::*;
use proptest::prelude::*;
use regex::Regex;

const A: &str = r"^(?P<pre>(?:[A-Za-z_]\w*\.)*?)(?P<unit>layers|blocks|h|decoder_layer|mtp)\.(?P<layer>\d+)\.(?P<mid>(?:[A-Za-z_]\w*\.)*?)experts\.(?P<expert>\d+)\.(?P<proj>gate_proj|up_proj|down_proj|gate_up_proj|gate_and_up_proj|w1|w2|w3|fc1|fc2|fc3|gate|up|down)\.(?P<leaf>[A-Za-z_][\w.]*)$";
const B: &str = r"^(?P<pre>(?:[A-Za-z_]\w*\.)*?)(?P<unit>layers|blocks)\.(?P<layer>\d+)\.(?P<mid>(?:[A-Za-z_]\w*\.)*?)experts\.(?P<proj>gate_up_projs|gate_projs|up_projs|down_projs)\.(?P<expert>\d+)\.(?P<leaf>[A-Za-z_][\w.]*)$";
const C: &str = r"^(?P<pre>(?:[A-Za-z_]\w*\.)*?)(?P<unit>layers|blocks|h|mtp)\.(?P<layer>\d+)\.(?P<mid>(?:[A-Za-z_]\w*\.)*?)(?:experts|switch_mlp|experts\.switch_glu|experts\.mlp)\.(?P<proj>gate_up_proj|gate_and_up_projs|gate_proj|up_proj|down_projs|down_proj|w13_weight|w2_weight|w1|w2|w3|v1|fc1|fc2)(?P<leaf>(?:[._][A-Za-z_][\w.]*)?)$";
const E: &str = r"^(?P<pre>(?:[A-Za-z_]\w*\.)*?)(?P<unit>layers)\.(?P<layer>\d+)\.(?P<mid>block_sparse_moe\.|mlp\.)(?P<proj>input_linear|output_linear)\.(?P<leaf>weight\w*)$";
const D: &str = r"^(?P<pre>(?:[A-Za-z_]\w*\.)*?)(?P<unit>layers)\.(?P<layer>\d+)\.(?P<mid>moe\.)(?P<proj>gate_proj|up_proj|down_proj)\.(?P<leaf>[A-Za-z_]\w*)$";
const GROK: &str = r"^(?P<pre>(?:[A-Za-z_]\w*\.)*?)(?P<unit>decoder_layer)\.(?P<layer>\d+)\.(?P<mid>moe\.)(?P<expert>\d+)\.(?P<proj>linear_v|linear_1|linear)\.(?P<leaf>weight)$";
const G: &str = r"^(?P<pre>)(?P<unit>blk)\.(?P<layer>\d+)\.ffn_(?P<proj>gate_up|gate|up|down)_exps\.(?P<leaf>weight|bias|scale|input_scale)$";
const G_OLD: &str = r"^(?P<pre>)(?P<unit>blk)\.(?P<layer>\d+)\.ffn_(?P<proj>gate|up|down)\.(?P<expert>\d+)\.(?P<leaf>weight|bias)$";

fn role_of(proj: &str) -> Projection {
    match proj {
        "gate_proj" | "w1" | "gate" | "linear" | "gate_projs" => GATE,
        "up_proj" | "w3" | "v1" | "up" | "linear_v" | "up_projs" => UP,
        "down_proj" | "w2" | "down" | "linear_1" | "output_linear" | "down_projs" | "w2_weight" => {
            DOWN
        }
        "fc1" => Projection::Fc(1),
        "fc2" => Projection::Fc(2),
        "fc3" => Projection::Fc(3),
        _ => GATE_UP,
    }
}

type Expected = (String, u32, Option<u32>, Projection, String);

/// What the regular expressions say of a name.
fn by_regex(regexes: &[Regex], name: &str) -> Option<Expected> {
    let c = regexes.iter().find_map(|r| r.captures(name))?;
    let get = |g: &str| c.name(g).map(|m| m.as_str());
    let leaf = match get("leaf") {
        None | Some("") => "weight",
        Some(l) => l.strip_prefix(['.', '_']).unwrap_or(l),
    };
    let leaf = match get("expert") {
        // In per-expert names the dot lies before the group.
        Some(_) => get("leaf").unwrap_or("weight"),
        None => leaf,
    };
    Some((
        format!("{}{}", get("pre")?, get("unit")?),
        get("layer")?.parse().ok()?,
        get("expert").and_then(|e| e.parse().ok()),
        role_of(get("proj")?),
        leaf.to_owned(),
    ))
}

fn by_splitter(name: &str) -> Option<Expected> {
    let r = recognise(name)?;
    Some((
        r.stack.to_owned(),
        r.layer,
        r.expert.as_ref().map(|e| e.0),
        r.projection,
        r.leaf.to_owned(),
    ))
}

fn regexes() -> Vec<Regex> {
    [A, B, C, E, D, GROK, G, G_OLD]
        .iter()
        .map(|r| Regex::new(r).unwrap())
        .collect()
}

/// Holds the two against each other: what the expressions find, the splitter finds; what only the
/// splitter finds lies below an expert's number or is one of the extensions named here.
fn compare(regexes: &[Regex], name: &str) {
    match (by_regex(regexes, name), by_splitter(name)) {
        (Some(want), got) => {
            let excluded =
                is_adapter(name) || name.contains("fc1_latent") || name.contains("fc2_latent");
            if !excluded {
                assert_eq!(got, Some(want), "{name}");
            }
        }
        (None, Some(_)) => assert!(
            [
                "experts",
                "switch_mlp",
                "moe",
                "input_linear",
                "output_linear",
                "ffn_"
            ]
            .iter()
            .any(|w| name.contains(w)),
            "{name}"
        ),
        (None, None) => {}
    }
}

fn name_parts() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![
        "model",
        "layers",
        "blocks",
        "h",
        "mtp",
        "decoder_layer",
        "language_model",
        "mlp",
        "moe",
        "experts",
        "block_sparse_moe",
        "switch_mlp",
        "switch_glu",
        "ffn",
        "0",
        "3",
        "17",
        "61",
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
        "gate_up_projs",
        "down_projs",
        "w1",
        "w2",
        "w3",
        "v1",
        "fc1",
        "fc2",
        "fc1_latent_proj",
        "w13_weight",
        "w2_weight_scale",
        "input_linear",
        "output_linear",
        "linear",
        "linear_v",
        "linear_1",
        "weight",
        "weight_scale_inv",
        "gate_up_proj_blocks",
        "down_proj_bias",
        "shared_experts",
        "blk",
        "ffn_gate_exps",
        "ffn_down",
        "ffn_gate_up_exps",
        "scale",
        "absmax",
        "lora_A",
        "",
        "\u{e9}t\u{e9}",
    ]);
    prop::collection::vec(part, 1..9).prop_map(|v| v.join("."))
}

fn likely_name() -> impl Strategy<Value = String> {
    let pre = prop::sample::select(vec![
        "",
        "model.",
        "model.language_model.",
        "thinker.model.",
        "mtp.",
        "backbone.",
        "transformer.",
    ]);
    let unit = prop::sample::select(vec!["layers", "blocks", "h", "mtp", "decoder_layer", "blk"]);
    let mid = prop::sample::select(vec![
        "",
        "mlp.",
        "ffn.",
        "block_sparse_moe.",
        "moe.",
        "mixer.",
        "feed_forward.",
        "mlp.deep.",
    ]);
    let module = prop::sample::select(vec![
        "experts.",
        "switch_mlp.",
        "experts.switch_glu.",
        "experts.mlp.",
        "",
        "shared_experts.",
    ]);
    let proj = prop::sample::select(vec![
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
        "gate_and_up_proj",
        "gate_and_up_projs",
        "down_projs",
        "gate_up_projs",
        "w1",
        "w2",
        "w3",
        "v1",
        "w13_weight",
        "w2_weight",
        "fc1",
        "fc2",
        "fc3",
        "gate",
        "up",
        "down",
        "input_linear",
        "output_linear",
        "linear",
        "linear_1",
        "linear_v",
        "ffn_gate_exps",
        "ffn_up_exps",
        "ffn_gate_up_exps",
        "ffn_down",
        "e_score_correction_bias",
    ]);
    let leaf = prop::sample::select(vec![
        "",
        ".weight",
        ".weight_scale_inv",
        "_scale_inv",
        "_blocks",
        ".weight.absmax",
        ".bias",
        ".scale",
        ".weight.quant_state.bitsandbytes__nf4",
        ".lora_A.weight",
        "s",
        ".7",
    ]);
    (
        pre,
        unit,
        0u32..70,
        mid,
        module,
        0u32..3,
        proj,
        0u32..400,
        leaf,
    )
        .prop_map(
            |(pre, unit, layer, mid, module, place, proj, expert, leaf)| match place {
                0 => format!("{pre}{unit}.{layer}.{mid}{module}{expert}.{proj}{leaf}"),
                1 => format!("{pre}{unit}.{layer}.{mid}{module}{proj}.{expert}{leaf}"),
                _ => format!("{pre}{unit}.{layer}.{mid}{module}{proj}{leaf}"),
            },
        )
}

#[test]
fn splitter_agrees_with_the_expressions_on_many_names() {
    let regexes = regexes();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 20_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&likely_name(), |name| {
            compare(&regexes, &name);
            Ok(())
        })
        .unwrap();
    runner
        .run(&name_parts(), |name| {
            compare(&regexes, &name);
            Ok(())
        })
        .unwrap();
}

#[test]
fn every_family_is_recognised() {
    // name, stack, layer, expert (-1: stacked), projection as in `role_of`, leaf
    #[rustfmt::skip] // a table
    let table: &[(&str, &str, u32, i64, &str, &str)] = &[
        ("model.layers.3.block_sparse_moe.experts.7.w1.weight", "model.layers", 3, 7, "w1", "weight"),
        ("model.layers.3.block_sparse_moe.experts.7.w2.weight", "model.layers", 3, 7, "w2", "weight"),
        ("model.layers.3.block_sparse_moe.experts.7.w3.weight", "model.layers", 3, 7, "w3", "weight"),
        ("model.layers.3.mlp.experts.17.gate_proj.weight", "model.layers", 3, 17, "gate_proj", "weight"),
        ("model.layers.61.mlp.experts.255.up_proj.weight_scale_inv", "model.layers", 61, 255, "up_proj", "weight_scale_inv"),
        ("mtp.layers.0.mlp.experts.5.down_proj.weight", "mtp.layers", 0, 5, "down_proj", "weight"),
        ("model.language_model.layers.2.mlp.experts.gate_up_proj", "model.language_model.layers", 2, -1, "gate_up_proj", "weight"),
        ("model.language_model.layers.2.mlp.experts.down_proj", "model.language_model.layers", 2, -1, "down_proj", "weight"),
        ("thinker.model.layers.0.mlp.experts.1.gate_proj.weight", "thinker.model.layers", 0, 1, "gate_proj", "weight"),
        ("talker.model.layers.0.mlp.experts.1.gate_proj.weight", "talker.model.layers", 0, 1, "gate_proj", "weight"),
        ("layers.4.ffn.experts.9.w1.scale", "layers", 4, 9, "w1", "scale"),
        ("mtp.0.ffn.experts.9.w3.weight", "mtp", 0, 9, "w3", "weight"),
        ("language_model.model.layers.1.mlp.experts.3.gate_proj.weight_packed", "language_model.model.layers", 1, 3, "gate_proj", "weight_packed"),
        ("language_model.model.layers.1.block_sparse_moe.experts.895.w1.weight_scale", "language_model.model.layers", 1, 895, "w1", "weight_scale"),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "model.layers", 0, -1, "gate_up_proj", "blocks"),
        ("model.layers.0.mlp.experts.down_proj_scales", "model.layers", 0, -1, "down_proj", "scales"),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", "model.layers", 0, -1, "gate_up_proj", "bias"),
        ("model.layers.0.mlp.experts.gate_up_projs.17.weight", "model.layers", 0, 17, "gate_up_projs", "weight"),
        ("model.layers.0.mlp.experts.down_projs.17.bias", "model.layers", 0, 17, "down_projs", "bias"),
        ("language_model.model.layers.1.feed_forward.experts.gate_up_proj", "language_model.model.layers", 1, -1, "gate_up_proj", "weight"),
        ("model.layers.5.block_sparse_moe.input_linear.weight", "model.layers", 5, -1, "input_linear", "weight"),
        ("model.layers.5.block_sparse_moe.output_linear.weight", "model.layers", 5, -1, "output_linear", "weight"),
        ("model.layers.5.mlp.input_linear.weight", "model.layers", 5, -1, "input_linear", "weight"),
        ("transformer.blocks.0.ffn.experts.mlp.w1", "transformer.blocks", 0, -1, "w1", "weight"),
        ("transformer.blocks.0.ffn.experts.mlp.v1", "transformer.blocks", 0, -1, "v1", "weight"),
        ("transformer.blocks.0.ffn.experts.mlp.w2", "transformer.blocks", 0, -1, "w2", "weight"),
        ("model.layers.4.feed_forward.experts.2.gate_proj.weight", "model.layers", 4, 2, "gate_proj", "weight"),
        ("backbone.layers.1.mixer.experts.2.up_proj.weight_scale_2", "backbone.layers", 1, 2, "up_proj", "weight_scale_2"),
        ("model.language_model.layers.2.experts.gate_up_proj", "model.language_model.layers", 2, -1, "gate_up_proj", "weight"),
        ("model.language_model.layers.2.experts.7.gate_proj.weight", "model.language_model.layers", 2, 7, "gate_proj", "weight"),
        ("model.layers.3.moe.gate_proj.weight", "model.layers", 3, -1, "gate_proj", "weight"),
        ("model.layers.3.moe.down_proj.weight_scale_inv", "model.layers", 3, -1, "down_proj", "weight_scale_inv"),
        ("model.layers.3.mlp.experts.gate_up_proj_scale_inv", "model.layers", 3, -1, "gate_up_proj", "scale_inv"),
        ("model.layers.3.mlp.experts.down_proj_activation_scale", "model.layers", 3, -1, "down_proj", "activation_scale"),
        ("layers.3.experts.8.w1.qscale_weight", "layers", 3, 8, "w1", "qscale_weight"),
        ("model.llm.layers.3.mlp.experts.w13_weight", "model.llm.layers", 3, -1, "w13_weight", "weight"),
        ("model.llm.layers.3.mlp.experts.w2_weight_scale", "model.llm.layers", 3, -1, "w2_weight", "scale"),
        ("model.layers.3.mlp.experts.fc1.weight", "model.layers", 3, -1, "fc1", "weight"),
        ("vision_encoder.blocks.3.mlp.experts.4.fc3.weight", "vision_encoder.blocks", 3, 4, "fc3", "weight"),
        ("model.layers.3.mlp.switch_mlp.gate_proj.scales", "model.layers", 3, -1, "gate_proj", "scales"),
        ("language_model.layers.3.experts.switch_glu.up_proj.biases", "language_model.layers", 3, -1, "up_proj", "biases"),
        ("transformer.decoder_layer.3.moe.5.linear_v.weight", "transformer.decoder_layer", 3, 5, "linear_v", "weight"),
        ("transformer.decoder_layer.3.moe.5.linear.weight", "transformer.decoder_layer", 3, 5, "linear", "weight"),
        ("transformer.decoder_layer.3.moe.5.linear_1.weight", "transformer.decoder_layer", 3, 5, "linear_1", "weight"),
        ("model.layers.3.mlp.experts.2.gate_proj.weight.quant_state.bitsandbytes__nf4", "model.layers", 3, 2, "gate_proj", "weight.quant_state.bitsandbytes__nf4"),
        ("model.layers.3.mlp.experts.2.gate_proj.trellis", "model.layers", 3, 2, "gate_proj", "trellis"),
        ("blk.3.ffn_gate_exps.weight", "blk", 3, -1, "gate", "weight"),
        ("blk.3.ffn_gate_up_exps.weight", "blk", 3, -1, "gate_up", "weight"),
        ("blk.3.ffn_down_exps.input_scale", "blk", 3, -1, "down", "input_scale"),
        ("blk.3.ffn_up.6.weight", "blk", 3, 6, "up", "weight"),
        ("blk.3.ffn_up_exps.6.numa.1.weight", "blk", 3, 6, "up", "numa.1.weight"),
        ("blk.3.ffn_down_exps.6.numa.0.scale", "blk", 3, 6, "down", "numa.0.scale"),
    ];
    for &(name, stack, layer, expert, proj, leaf) in table {
        let expert = u32::try_from(expert).ok();
        assert_eq!(
            by_splitter(name),
            Some((stack.into(), layer, expert, role_of(proj), leaf.into())),
            "{name}"
        );
        if let Some((e, digits)) = recognise(name).unwrap().expert {
            assert_eq!(name[digits], e.to_string(), "{name}");
        }
    }
}

#[test]
fn what_looks_alike_is_no_expert() {
    for name in [
        "model.layers.1.mlp.shared_expert.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.gate_proj.weight",
        "model.layers.1.block_sparse_moe.shared_experts.gate_proj.weight",
        "model.layers.1.share_expert.gate_proj.weight",
        "model.layers.1.feed_forward.shared_expert.up_proj.weight",
        "model.layers.1.mlp.shared_mlp.gate_proj.weight",
        "model.layers.1.shared_mlp.input_linear.weight",
        "model.layers.1.shared_mlp.output_linear.weight",
        "backbone.layers.1.mixer.shared_experts.up_proj.weight",
        "model.layers.1.residual_mlp.w1.weight",
        "model.layers.1.mlps.0.gate_proj.weight",
        "layers.1.shared_experts.w1.weight",
        "layers.1.ffn.shared_experts.w1.weight",
        "model.layers.1.mlp.chunk_experts.3.gate_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.layers.1.mlp.router.weight",
        "model.layers.1.mlp.gate.wg.weight",
        "model.layers.1.mlp.router.classifier.weight",
        "model.layers.1.block_sparse_moe.router.layer.weight",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.experts.e_score_correction_bias",
        "model.layers.1.mlp.expert_bias",
        "model.layers.1.mlp.moe_statics.e_score_correction_bias",
        "model.layers.1.mlp.router_bias",
        "model.layers.1.mlp.gate.bias",
        "layers.1.ffn.gate.tid2eid",
        "model.language_model.layers.1.router.per_expert_scale",
        "backbone.layers.1.mixer.fc1_latent_proj.weight",
        "backbone.layers.1.mixer.experts.fc1_latent_proj.weight",
        "backbone.layers.1.mixer.experts.fc2_latent_proj.weight",
        "model.layers.1.block_sparse_moe.routed_expert_down_proj.weight",
        "model.layers.1.block_sparse_moe.routed_expert_norm.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.self_attention.experts.input_linear.weight",
        "base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight",
        "model.layers.0.mlp.experts.gate_up_proj.lora_B.weight",
        "blk.1.ffn_gate_shexp.weight",
        "blk.1.ffn_up_shexp.weight",
        "blk.1.ffn_gate_chexps.weight",
        "blk.1.ffn_gate_inp.weight",
        "blk.1.ffn_gate_inp_shexp.weight",
        "blk.1.exp_probs_b.bias",
        "blk.1.ffn_norm_exps.weight",
        "blk.1.ffn_latent_up.weight",
        "blk.1.ffn_gate_tid2eid.weight",
        "blk.1.ffn_gate.weight",
        "blk.1.ffn_gate_exps.weight.lora_a",
        "model.layers.1.mlp.experts.07.gate_proj.weight",
        "model.layers.1.mlp.experts.65535.gate_proj.weight",
        "model.layers.99999999999.mlp.experts.0.gate_proj.weight",
        "",
        ".",
        "layers.",
        "layers.0.experts.",
        "layers.0.experts.0.",
        "blk.",
        "blk.0.ffn_gate_exps.",
    ] {
        assert_eq!(recognise(name), None, "{name}");
    }
}

#[test]
fn what_is_unknown_below_an_expert_is_kept_as_its_bytes() {
    let r = recognise("model.layers.1.mlp.experts.4.act_scales").unwrap();
    assert_eq!((r.projection, r.leaf), (OTHER, "act_scales"));
    let r = recognise("model.layers.1.mlp.experts.4.proj.sub.weight").unwrap();
    assert_eq!((r.projection, r.leaf), (OTHER, "proj.sub.weight"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_text_is_taken_without_a_panic(name in "\\PC*", tail in "[a-z0-9_.]{0,40}") {
        recognise(&name);
        recognise(&format!("layers.1.{tail}"));
        recognise(&format!("layers.1.experts.{tail}{name}"));
        recognise(&format!("blk.1.{tail}"));
    }
}
