//! Where the numbers are found in configurations.

use super::*;
use serde_json::json;

fn facts(json: Value, prefix: &str) -> Facts {
    Config::of_json("config.json", json).facts(prefix)
}

#[test]
fn numbers_are_found_wherever_families_put_them() {
    let all = |n| Some(Experts::All(n));
    let f = facts(
        json!({"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 32}),
        "model.layers",
    );
    assert_eq!((f.experts, f.top_k, f.layers), (all(8), Some(2), Some(32)));
    let f = facts(
        json!({"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}, "n_layers": 40}),
        "transformer.blocks",
    );
    assert_eq!((f.experts, f.top_k, f.layers), (all(16), Some(4), Some(40)));
    let f = facts(
        json!({"text_config": {"num_experts": 128, "top_k_experts": 8, "num_hidden_layers": 30}, "num_hidden_layers": 5}),
        "model.language_model.layers",
    );
    assert_eq!(
        (f.experts, f.top_k, f.layers),
        (all(128), Some(8), Some(30))
    );
    let f = facts(
        json!({"n_routed_experts": 256, "num_experts": null, "num_hidden_layers": 61, "num_nextn_predict_layers": 1}),
        "model.layers",
    );
    assert_eq!(
        (f.experts, f.layers, f.mtp_layers),
        (all(256), Some(61), Some(1))
    );
    let f = facts(
        json!({"n_routed_experts": 512, "zero_expert_num": 256, "num_layers": 28}),
        "model.layers",
    );
    assert_eq!((f.zero_experts, f.layers), (256, Some(28)));
    let f = facts(
        json!({"num_hidden_layers": null, "hybrid_override_pattern": "ME*E"}),
        "backbone.layers",
    );
    assert_eq!(f.layers, Some(4));
    let f = facts(
        json!({"layers_block_type": ["moe", "mlp"]}),
        "backbone.layers",
    );
    assert_eq!(f.layers, Some(2));
    let f = facts(
        json!({"moe": {"num_experts": 128, "num_experts_per_tok": 4}, "n_layers": 3}),
        "layers",
    );
    assert_eq!((f.experts, f.top_k), (all(128), Some(4)));
    let f = facts(json!({"moe_num_experts": [64, null, 32]}), "model.layers");
    assert_eq!(
        f.experts,
        Some(Experts::List(vec![Some(64), None, Some(32)]))
    );
}

#[test]
fn each_stack_reads_its_own_section() {
    let omni = json!({
        "thinker_config": {"text_config": {"num_experts": 128, "num_hidden_layers": 48}},
        "talker_config": {"text_config": {"num_experts": 64, "num_hidden_layers": 20}},
    });
    assert_eq!(
        facts(omni.clone(), "thinker.model.layers").experts,
        Some(Experts::All(128))
    );
    let talker = facts(omni, "talker.model.layers");
    assert_eq!(
        (talker.experts, talker.layers),
        (Some(Experts::All(64)), Some(20))
    );
    let tower = json!({"num_experts": 128, "num_hidden_layers": 2, "vision_config": {"num_hidden_layers": 40}});
    let f = facts(tower, "vision_encoder.blocks");
    assert_eq!((f.experts, f.layers), (None, Some(40)));
}

#[test]
fn odd_documents_say_nothing() {
    for json in [
        json!(null),
        json!([1]),
        json!("x"),
        json!({"num_experts": "8", "num_hidden_layers": -1, "text_config": 3}),
    ] {
        assert_eq!(facts(json, "model.layers"), Facts::default());
    }
}

#[test]
fn gguf_trunk_ends_before_the_mtp_layers() {
    let kv: Metadata = [
        ("general.architecture", Kv::Text("glm4moe".into())),
        ("glm4moe.block_count", Kv::Number(47)),
        ("glm4moe.nextn_predict_layers", Kv::Number(1)),
        ("glm4moe.expert_count", Kv::Number(128)),
        ("glm4moe.expert_used_count", Kv::Number(8)),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v))
    .collect();
    let config = Config::of_gguf(&kv);
    let f = config.facts("blk");
    assert_eq!(
        (f.layers, f.top_k, f.experts),
        (Some(46), Some(8), Some(Experts::All(128)))
    );
    assert_eq!(config.metadata["general.architecture"], "glm4moe");
}
