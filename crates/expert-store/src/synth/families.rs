//! The table of families: how each names, stacks and quantises its experts.

use crate::catalogue::Container;

/// What a projection is, which gives its shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Projection {
    Gate,
    GateUp,
    Up,
    Down,
}
use Projection::{Down, Gate, GateUp, Up};

/// How tensors hold experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// `experts.<e>.<projection>.<leaf>`.
    PerExpert,
    /// `<projection>` for the weight and `<projection><separator><leaf>` for other leaves; the weight
    /// itself is named, too, where `named` is set. `transposed`: `[in, out]`.
    Stacked {
        separator: &'static str,
        named: bool,
        transposed: bool,
    },
    /// `[E * rows, columns]`; the down projection is stored `[I, H]`.
    Flattened,
    /// `blk.N.<projection>.<leaf>`.
    Gguf,
}

/// How projections are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scheme {
    /// One `weight`.
    Plain,
    /// F8_E4M3 in blocks of 128 x 128; the type of `weight_scale_inv`.
    Fp8Block(&'static str),
    Nvfp4ModelOpt,
    Nvfp4CompressedTensors,
    /// Group 32.
    Int4,
    /// U8 scales, group 32.
    Mxfp4CompressedTensors,
    /// I8 weights and F8_E8M0 scales.
    Mxfp4DeepSeek,
    /// `blocks`, `scales`, `bias`.
    Mxfp4GptOss,
    /// 4 bits, group 64.
    Mlx,
    /// Group 128.
    Gptq,
    /// Types of gate/up and of down; down falls back to the first in every second layer.
    Ggml {
        wide: &'static str,
        down: &'static str,
        bias: bool,
        scale: bool,
    },
}

/// One family.
#[derive(Debug)]
pub struct Family {
    /// What `--family` takes.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    /// Keys nested under this one in `config.json`.
    pub(super) nested: Option<&'static str>,
    pub(super) stack: &'static str,
    /// What is between the layer's number and the expert or projection.
    pub(super) module: &'static str,
    pub(super) projections: &'static [(&'static str, Projection)],
    pub(super) layout: Layout,
    pub(super) scheme: Scheme,
    /// Tensors that are not experts, `{}` is the layer: name, and whether it is as large as a weight.
    pub(super) decoys: &'static [(&'static str, bool)],
    /// Keys of `config.json` for number of experts, experts per token and intermediate size.
    pub(super) keys: [&'static str; 3],
    pub(super) layers_key: &'static str,
    pub(super) hidden_key: &'static str,
    /// Further numbers of `config.json`.
    pub(super) extra: &'static [(&'static str, i64)],
    /// Dense layers before the first MoE layer.
    pub(super) dense: u32,
    /// Every n-th layer has experts (the last of n).
    pub(super) every: u32,
    /// MoE layers of multi-token prediction after the trunk.
    pub(super) mtp: u32,
    /// Whether the safetensors header is padded to 8 bytes.
    pub(super) padded: bool,
    pub(super) layers: u32,
    pub(super) experts: u32,
    pub(super) hidden: u32,
    pub(super) inter: u32,
}

impl Family {
    /// File format it comes in.
    pub fn container(&self) -> Container {
        match self.layout {
            Layout::Gguf => Container::Gguf,
            _ => Container::Safetensors,
        }
    }
}

const QWEN: &[(&str, Projection)] = &[("gate_proj", Gate), ("up_proj", Up), ("down_proj", Down)];
const W123: &[(&str, Projection)] = &[("w1", Gate), ("w2", Down), ("w3", Up)];
const FUSED: &[(&str, Projection)] = &[("gate_up_proj", GateUp), ("down_proj", Down)];
const GGUF: &[(&str, Projection)] = &[
    ("ffn_gate_exps", Gate),
    ("ffn_up_exps", Up),
    ("ffn_down_exps", Down),
];
const GGUF_FUSED: &[(&str, Projection)] = &[("ffn_gate_up_exps", GateUp), ("ffn_down_exps", Down)];

const QWEN_KEYS: [&str; 3] = [
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
];
const V3_KEYS: [&str; 3] = [
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
];
const LOCAL_KEYS: [&str; 3] = [
    "num_local_experts",
    "num_experts_per_tok",
    "intermediate_size",
];

const QWEN_DECOYS: &[(&str, bool)] = &[
    ("mlp.gate.weight", false),
    ("mlp.shared_expert.gate_proj.weight", true),
    ("mlp.shared_expert_gate.weight", false),
    ("input_layernorm.weight", false),
];
const V3_DECOYS: &[(&str, bool)] = &[
    ("mlp.gate.weight", false),
    ("mlp.gate.e_score_correction_bias", false),
    ("mlp.shared_experts.gate_proj.weight", true),
    ("mlp.shared_experts.down_proj.weight", true),
];
const SPARSE_DECOYS: &[(&str, bool)] = &[
    ("block_sparse_moe.gate.weight", false),
    ("input_layernorm.weight", false),
];
const GGUF_DECOYS: &[(&str, bool)] = &[
    ("ffn_gate_inp.weight", false),
    ("ffn_gate_shexp.weight", true),
    ("ffn_norm.weight", false),
];

const SUFFIXLESS: Layout = Layout::Stacked {
    separator: "_",
    named: false,
    transposed: false,
};
const SUFFIXLESS_TRANSPOSED: Layout = Layout::Stacked {
    separator: "_",
    named: false,
    transposed: true,
};
const DOTTED: Layout = Layout::Stacked {
    separator: ".",
    named: true,
    transposed: false,
};

/// What most share; each entry names its differences.
const BASE: Family = Family {
    name: "",
    about: "",
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    nested: None,
    stack: "model.layers",
    module: "mlp.experts",
    projections: QWEN,
    layout: Layout::PerExpert,
    scheme: Scheme::Plain,
    decoys: QWEN_DECOYS,
    keys: QWEN_KEYS,
    layers_key: "num_hidden_layers",
    hidden_key: "hidden_size",
    extra: &[],
    dense: 0,
    every: 1,
    mtp: 0,
    padded: true,
    layers: 4,
    experts: 16,
    hidden: 512,
    inter: 256,
};

const V3: Family = Family {
    model_type: "deepseek_v3",
    architecture: "DeepseekV3ForCausalLM",
    decoys: V3_DECOYS,
    keys: V3_KEYS,
    extra: &[("first_k_dense_replace", 1), ("moe_layer_freq", 1)],
    dense: 1,
    ..BASE
};

const MIXTRAL: Family = Family {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    module: "block_sparse_moe.experts",
    projections: W123,
    decoys: SPARSE_DECOYS,
    keys: LOCAL_KEYS,
    ..BASE
};

const GGUF_BASE: Family = Family {
    model_type: "qwen3moe",
    architecture: "",
    stack: "blk",
    module: "",
    projections: GGUF,
    layout: Layout::Gguf,
    decoys: GGUF_DECOYS,
    ..BASE
};

/// All families, in alphabetical order.
pub static FAMILIES: &[Family] = &[
    Family {
        name: "dbrx",
        about: "DBRX, BF16, rows of all experts in one matrix",
        model_type: "dbrx",
        architecture: "DbrxForCausalLM",
        stack: "transformer.blocks",
        module: "ffn.experts.mlp",
        projections: &[("w1", Gate), ("v1", Up), ("w2", Down)],
        layout: Layout::Flattened,
        decoys: &[("ffn.router.layer.weight", false)],
        keys: ["moe_num_experts", "moe_top_k", "ffn_hidden_size"],
        nested: Some("ffn_config"),
        layers_key: "n_layers",
        hidden_key: "d_model",
        ..BASE
    },
    Family {
        name: "deepseek-v3",
        about: "DeepSeek-V3, FP8 in blocks, with a multi-token-prediction layer",
        scheme: Scheme::Fp8Block("F32"),
        mtp: 1,
        ..V3
    },
    Family {
        name: "deepseek-v4",
        about: "DeepSeek-V4, MXFP4 as I8 with E8M0 scales",
        model_type: "deepseek_v4",
        architecture: "DeepseekV4ForCausalLM",
        stack: "layers",
        module: "ffn.experts",
        projections: W123,
        scheme: Scheme::Mxfp4DeepSeek,
        decoys: &[
            ("ffn.gate.weight", false),
            ("ffn.shared_experts.w1.weight", true),
        ],
        extra: &[],
        dense: 0,
        ..V3
    },
    Family {
        name: "gguf-gemma4",
        about: "GGUF, fused gate and up in Q8_0 with a scale per expert",
        model_type: "gemma4",
        projections: GGUF_FUSED,
        scheme: Scheme::Ggml {
            wide: "Q8_0",
            down: "Q8_0",
            bias: false,
            scale: true,
        },
        ..GGUF_BASE
    },
    Family {
        name: "gguf-gpt-oss",
        about: "GGUF, MXFP4 with biases",
        model_type: "gpt-oss",
        scheme: Scheme::Ggml {
            wide: "MXFP4",
            down: "MXFP4",
            bias: true,
            scale: false,
        },
        hidden: 480,
        inter: 480,
        ..GGUF_BASE
    },
    Family {
        name: "gguf-qwen3moe",
        about: "GGUF, Q4_K with Q6_K for the down projection of every second layer",
        scheme: Scheme::Ggml {
            wide: "Q4_K",
            down: "Q6_K",
            bias: false,
            scale: false,
        },
        ..GGUF_BASE
    },
    Family {
        name: "gpt-oss",
        about: "gpt-oss, MXFP4 blocks, scales and biases, stacked",
        model_type: "gpt_oss",
        architecture: "GptOssForCausalLM",
        projections: FUSED,
        layout: SUFFIXLESS,
        scheme: Scheme::Mxfp4GptOss,
        decoys: &[("mlp.router.weight", false), ("mlp.router.bias", false)],
        keys: LOCAL_KEYS,
        hidden: 480,
        inter: 480,
        ..BASE
    },
    Family {
        name: "gpt-oss-bf16",
        about: "gpt-oss in BF16, stacked and transposed",
        model_type: "gpt_oss",
        architecture: "GptOssForCausalLM",
        projections: FUSED,
        layout: SUFFIXLESS_TRANSPOSED,
        decoys: &[("mlp.router.weight", false), ("mlp.router.bias", false)],
        keys: LOCAL_KEYS,
        hidden: 480,
        inter: 480,
        ..BASE
    },
    Family {
        name: "granite",
        about: "Granite MoE, BF16, stacked as input_linear and output_linear",
        model_type: "granitemoe",
        architecture: "GraniteMoeForCausalLM",
        module: "block_sparse_moe",
        projections: &[("input_linear", GateUp), ("output_linear", Down)],
        layout: DOTTED,
        decoys: &[("block_sparse_moe.router.layer.weight", false)],
        keys: LOCAL_KEYS,
        ..BASE
    },
    Family {
        name: "kimi-int4",
        about: "Kimi-K2-Thinking, INT4 in groups of 32 with weight_shape",
        scheme: Scheme::Int4,
        ..V3
    },
    Family {
        name: "kimi-k3",
        about: "Kimi-K3, MXFP4 (compressed-tensors)",
        model_type: "kimi_k3",
        architecture: "KimiK3ForConditionalGeneration",
        nested: Some("text_config"),
        stack: "language_model.model.layers",
        module: "block_sparse_moe.experts",
        projections: W123,
        scheme: Scheme::Mxfp4CompressedTensors,
        decoys: &[
            ("block_sparse_moe.gate.weight", false),
            ("block_sparse_moe.shared_experts.gate_proj.weight", true),
        ],
        keys: [
            "num_experts",
            "num_experts_per_token",
            "moe_intermediate_size",
        ],
        extra: &[("first_k_dense_replace", 1)],
        dense: 1,
        ..BASE
    },
    Family {
        name: "llama4",
        about: "Llama-4, BF16, stacked and transposed",
        model_type: "llama4",
        architecture: "Llama4ForConditionalGeneration",
        nested: Some("text_config"),
        stack: "language_model.model.layers",
        module: "feed_forward.experts",
        projections: FUSED,
        layout: SUFFIXLESS_TRANSPOSED,
        decoys: &[
            ("feed_forward.router.weight", false),
            ("feed_forward.shared_expert.gate_proj.weight", true),
        ],
        keys: LOCAL_KEYS,
        extra: &[("interleave_moe_layer_step", 1)],
        ..BASE
    },
    Family {
        name: "minimax-m2",
        about: "MiniMax-M2, FP8 in blocks",
        model_type: "minimax_m2",
        architecture: "MiniMaxM2ForCausalLM",
        scheme: Scheme::Fp8Block("F32"),
        ..MIXTRAL
    },
    Family {
        name: "mixtral",
        about: "Mixtral, BF16, one tensor per expert",
        experts: 8,
        ..MIXTRAL
    },
    Family {
        name: "mlx",
        about: "MLX 4 bit, stacked as switch_mlp, unaligned data",
        module: "mlp.switch_mlp",
        layout: DOTTED,
        scheme: Scheme::Mlx,
        padded: false,
        ..BASE
    },
    Family {
        name: "nemotron",
        about: "Nemotron-H, BF16, up and down only, every second layer",
        model_type: "nemotron_h",
        architecture: "NemotronHForCausalLM",
        stack: "backbone.layers",
        module: "mixer.experts",
        projections: &[("up_proj", Up), ("down_proj", Down)],
        decoys: &[
            ("mixer.gate.weight", false),
            ("mixer.shared_experts.up_proj.weight", true),
        ],
        keys: V3_KEYS,
        every: 2,
        ..BASE
    },
    Family {
        name: "nvfp4-ct",
        about: "Qwen3-MoE in NVFP4 as compressed-tensors writes it",
        scheme: Scheme::Nvfp4CompressedTensors,
        ..BASE
    },
    Family {
        name: "nvfp4-modelopt",
        about: "Qwen3-MoE in NVFP4 as ModelOpt writes it",
        scheme: Scheme::Nvfp4ModelOpt,
        ..BASE
    },
    Family {
        name: "olmoe",
        about: "OLMoE, BF16, one tensor per expert",
        model_type: "olmoe",
        architecture: "OlmoeForCausalLM",
        keys: ["num_experts", "num_experts_per_tok", "intermediate_size"],
        ..BASE
    },
    Family {
        name: "qwen3-moe",
        about: "Qwen3-MoE, BF16, one tensor per expert",
        ..BASE
    },
    Family {
        name: "qwen3-moe-fp8",
        about: "Qwen3-MoE, FP8 in blocks with BF16 scales",
        scheme: Scheme::Fp8Block("BF16"),
        ..BASE
    },
    Family {
        name: "qwen3-moe-gptq",
        about: "Qwen3-MoE, GPTQ 4 bit in groups of 128",
        scheme: Scheme::Gptq,
        ..BASE
    },
    Family {
        name: "qwen3.5-moe",
        about: "Qwen3.5-MoE, BF16, fused and stacked",
        model_type: "qwen3_5_moe",
        architecture: "Qwen3_5MoeForConditionalGeneration",
        nested: Some("text_config"),
        stack: "model.language_model.layers",
        projections: FUSED,
        layout: SUFFIXLESS,
        ..BASE
    },
];
