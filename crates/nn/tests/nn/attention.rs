//! Attention and transformers with inputs that they refuse, and what PyTorch has no counterpart of.

use overdrive_nn::{
    Attend, Encode, LayerNorm, Module, MultiheadAttention, NnError, TransformerEncoder, TransformerEncoderLayer,
    generate_square_subsequent_mask,
};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A model with attention inside of it.
#[derive(Debug, Module)]
struct Model {
    attn: MultiheadAttention,
}

/// A model whose layers know their names, as after an optimizer was made for it, in evaluation mode if asked for.
fn model(is_training: bool) -> Model {
    let attn = MultiheadAttention::builder(8, 2).batch_first(true).build().unwrap();
    let model = Model { attn };
    model.set_training(is_training);
    model
}

/// What attention says to masks and inputs `[batch, length, size]`, with PyTorch's fused operator and without.
fn refusals(input: &[i64], how: Attend<'_>) -> [String; 2] {
    let _no_grad = tch::no_grad_guard();
    let x = Tensor::ones(input, FLOAT);
    [true, false].map(|is_training| model(is_training).attn.attend(&x, &x, &x, how).unwrap_err().to_string())
}

#[test]
fn an_input_of_another_size_is_refused_by_name() {
    for message in refusals(&[2, 4, 7], Attend::default()) {
        assert!(message.starts_with("attn: MultiheadAttention: "), "{message}");
        assert!(message.contains("the query is [2, 4, 7], but has to be [2, 4, 8]"), "{message}");
    }
    for message in refusals(&[8], Attend::default()) {
        assert!(message.contains("the query is [8], but has to be of 2 dimensions"), "{message}");
    }
}

#[test]
fn keys_and_values_that_do_not_fit_are_refused() {
    let attn = MultiheadAttention::builder(8, 2).kdim(5).build().unwrap();
    let attend = |key: [i64; 3], value: [i64; 3]| {
        let [query, key, value] = [[4, 2, 8], key, value].map(|shape| Tensor::ones(shape, FLOAT));
        attn.forward(&query, &key, &value).map_err(|error| error.to_string())
    };
    assert!(attend([3, 2, 5], [3, 2, 8]).is_ok());
    let message = attend([3, 2, 6], [3, 2, 8]).unwrap_err();
    assert!(message.contains("the key is [3, 2, 6], but has to be [3, 2, 5]"), "{message}");
    let message = attend([3, 2, 5], [4, 2, 8]).unwrap_err();
    assert!(message.contains("the value is [4, 2, 8], but has to be [3, 2, 8]"), "{message}");
    let message = attend([3, 1, 5], [3, 1, 8]).unwrap_err();
    assert!(message.contains("the key is [3, 1, 5], but has to be [3, 2, 5]"), "{message}");
}

#[test]
fn masks_that_do_not_fit_are_refused() {
    let (mask, padding) = (Tensor::zeros([3, 4], (Kind::Bool, Device::Cpu)), Tensor::zeros([2, 5], FLOAT));
    let wrong_mask = Attend { attn_mask: Some(&mask), ..Attend::default() };
    for message in refusals(&[2, 4, 8], wrong_mask) {
        assert!(message.starts_with("attn: MultiheadAttention: "), "{message}");
        assert!(message.contains("the attention mask is [3, 4], but has to be [4, 4] or [4, 4, 4]"), "{message}");
    }
    let wrong_padding = Attend { key_padding_mask: Some(&padding), ..Attend::default() };
    for message in refusals(&[2, 4, 8], wrong_padding) {
        assert!(message.contains("the key padding mask is [2, 5], but has to be [2, 4]"), "{message}");
    }
    let whole_numbers = Tensor::zeros([4, 4], (Kind::Int64, Device::Cpu));
    for message in refusals(&[2, 4, 8], Attend { attn_mask: Some(&whole_numbers), ..Attend::default() }) {
        assert!(message.contains("a mask is Int64, but has to be Bool or floating-point"), "{message}");
    }
    let undefined = Tensor::new();
    for message in refusals(&[2, 4, 8], Attend { attn_mask: Some(&undefined), ..Attend::default() }) {
        assert!(message.starts_with("attn: MultiheadAttention: "), "{message}");
    }
}

#[test]
fn a_causal_hint_without_a_mask_is_refused() {
    for need_weights in [true, false] {
        for message in refusals(&[2, 4, 8], Attend { is_causal: true, need_weights, ..Attend::default() }) {
            assert!(message.starts_with("MultiheadAttention: `is_causal` is true without a mask"), "{message}");
        }
    }
    let layer = TransformerEncoderLayer::builder(8, 2).dim_feedforward(4).batch_first(true).build().unwrap();
    let encoder = TransformerEncoder::new(&layer, 2).unwrap();
    encoder.eval();
    let (_no_grad, x) = (tch::no_grad_guard(), Tensor::ones([2, 4, 8], FLOAT));
    let message = encoder.encode(&x, Encode { is_causal: Some(true), ..Encode::default() }).unwrap_err().to_string();
    assert!(message.contains("`is_causal` is true without a mask"), "{message}");
}

#[test]
fn an_empty_batch_gives_an_empty_output() {
    let (x, mask) = (Tensor::ones([0, 4, 8], FLOAT), Tensor::zeros([0, 4, 4], FLOAT));
    for need_weights in [true, false] {
        let how = Attend { attn_mask: Some(&mask), need_weights, ..Attend::default() };
        let (y, weights) = model(true).attn.attend(&x, &x, &x, how).unwrap();
        assert_eq!(y.size(), [0, 4, 8]);
        assert_eq!(weights.map(|it| it.size()), need_weights.then(|| vec![0, 4, 4]));
    }
}

#[test]
fn options_out_of_their_range_are_refused() {
    let options = [
        (MultiheadAttention::new(8, 3).map(drop), "embed_dim"),
        (MultiheadAttention::new(0, 1).map(drop), "embed_dim"),
        (MultiheadAttention::new(8, 0).map(drop), "num_heads"),
        (MultiheadAttention::builder(8, 2).kdim(0).build().map(drop), "kdim"),
        (MultiheadAttention::builder(8, 2).dropout(1.5).build().map(drop), "dropout"),
        (TransformerEncoderLayer::new(8, 3).map(drop), "embed_dim"),
        (TransformerEncoderLayer::builder(8, 2).dim_feedforward(-1).build().map(drop), "out_features"),
        (TransformerEncoder::new(&TransformerEncoderLayer::new(8, 2).unwrap(), 0).map(drop), "num_layers"),
    ];
    for (result, wanted) in options {
        match result {
            Err(NnError::InvalidOption { option, .. }) => assert_eq!(option, wanted),
            other => panic!("`{wanted}` should be refused, but: {other:?}"),
        }
    }
}

#[test]
fn a_transformer_names_what_it_refuses() {
    let layer = TransformerEncoderLayer::builder(8, 2).dim_feedforward(4).batch_first(true).build().unwrap();
    let encoder = TransformerEncoder::builder(&layer, 2).norm(LayerNorm::new(8).unwrap()).build().unwrap();
    let _no_grad = tch::no_grad_guard();
    for is_training in [true, false] {
        encoder.set_training(is_training);
        let message = encoder.forward(&Tensor::ones([2, 4, 7], FLOAT)).unwrap_err().to_string();
        assert!(message.starts_with("TransformerEncoder: ") && message.contains("[2, 4, 8]"), "{message}");
        let message = encoder.layers[1].forward(&Tensor::ones([2, 4, 7], FLOAT)).unwrap_err().to_string();
        assert!(message.starts_with("layers.1: TransformerEncoderLayer: "), "{message}");
        let (x, padding) = (Tensor::ones([2, 4, 8], FLOAT), Tensor::zeros([2, 3], (Kind::Bool, Device::Cpu)));
        let how = Encode { src_key_padding_mask: Some(&padding), ..Encode::default() };
        let message = encoder.encode(&x, how).unwrap_err().to_string();
        assert!(message.contains("the key padding mask is [2, 3], but has to be [2, 4]"), "{message}");
    }
    assert!(generate_square_subsequent_mask(-1, FLOAT).is_err());
}

#[test]
fn layers_of_an_encoder_are_copies_that_share_nothing() {
    let layer = TransformerEncoderLayer::builder(8, 2).dim_feedforward(4).build().unwrap();
    layer.self_attn.requires_grad_(false).unwrap();
    let encoder = TransformerEncoder::new(&layer, 2).unwrap();
    let _no_grad = tch::no_grad_guard();
    let before = layer.linear1.weight.copy();
    let _ = encoder.layers[0].linear1.weight.shallow_clone().fill_(3.0);
    assert_eq!(layer.linear1.weight.shallow_clone(), before);
    assert_eq!(encoder.layers[1].linear1.weight.shallow_clone(), before);
    let trained = |name: &str| !name.contains("self_attn");
    for parameter in encoder.named_parameters() {
        let name = parameter.name().unwrap();
        assert_eq!(parameter.tensor().requires_grad(), trained(name), "{name}");
    }
}

#[test]
fn an_encoder_with_one_layer_in_training_computes_padded_places() {
    let layer = TransformerEncoderLayer::builder(8, 2).dim_feedforward(4).dropout(0.0).batch_first(true);
    let encoder = TransformerEncoder::new(&layer.build().unwrap(), 2).unwrap();
    let (_no_grad, x) = (tch::no_grad_guard(), Tensor::rand([2, 4, 8], FLOAT));
    let padding = Tensor::from_slice2(&[[false, false, false, false], [false, false, true, true]]);
    let how = Encode { src_key_padding_mask: Some(&padding), ..Encode::default() };
    let encode = || encoder.encode(&x, how).unwrap();
    encoder.eval();
    let without_padding = encode();
    encoder.layers[1].train();
    let with_padding = encode();
    let (padded, zeros) = (without_padding.get(1).narrow(0, 2, 2), Tensor::zeros([2, 8], FLOAT));
    assert_eq!(padded, zeros);
    assert_ne!(with_padding.get(1).narrow(0, 2, 2), zeros);
    assert!(without_padding.get(0).allclose(&with_padding.get(0), 1e-5, 1e-6, false));
}
