//! What models refuse, and tied weights.

use overdrive_nn::models::*;
use overdrive_nn::{Module, NnError, module_entries};
use tch::{Device, Kind, Tensor};

fn error<T>(result: Result<T, NnError>) -> String {
    result.map(|_| ()).unwrap_err().to_string()
}

fn small_vit() -> VisionTransformerBuilder {
    VisionTransformer::builder().image_size(8).patch_size(4).num_layers(1).num_heads(2).hidden_dim(4).mlp_dim(8)
}

fn small_gpt2() -> Gpt2LmHeadModelBuilder {
    Gpt2LmHeadModel::builder().vocab_size(11).n_positions(5).n_embd(8).n_layer(1).n_head(2)
}

#[test]
fn options_out_of_their_range_are_refused_by_name() {
    let block = ResnetBlock::Basic;
    let refused = [
        (error(Resnet::builder(block, [1, 0, 1, 1]).build()), "layers"),
        (error(Resnet::builder(block, [1, 1, 1, 1]).num_classes(-1).build()), "out_features"),
        (error(MobilenetV2::builder().width_mult(f64::NAN).build()), "width_mult"),
        (error(MobilenetV2::builder().width_mult(-1.0).build()), "width_mult"),
        (error(MobilenetV2::builder().dropout(1.5).build()), "`p`"),
        (error(Efficientnet::builder().stochastic_depth_prob(-0.1).build()), "stochastic_depth_prob"),
        (error(small_vit().patch_size(0).build()), "patch_size"),
        (error(small_vit().image_size(9).build()), "divisible by the patches' size, 4"),
        (error(small_vit().num_heads(3).build()), "divisible by the 3 heads"),
        (error(small_gpt2().n_head(3).build()), "divisible by the 3 heads"),
        (error(small_gpt2().attn_pdrop(2.0).build()), "attn_pdrop"),
        (error(small_gpt2().vocab_size(0).build()), "vocab_size"),
    ];
    for (message, named) in refused {
        assert!(message.contains(named), "{message:?} does not say {named:?}");
    }
}

#[test]
fn sizes_beyond_memory_are_errors() {
    error(MobilenetV2::builder().width_mult(1e300).build());
    error(small_vit().image_size(1 << 62).build());
    error(small_gpt2().n_embd(1 << 61).build());
}

#[test]
fn inputs_that_do_not_fit_are_refused_with_what_would_be_right() -> Result<(), NnError> {
    let (vit, gpt2) = (small_vit().build()?, small_gpt2().build()?);
    let image = Tensor::zeros([1, 3, 8, 4], (Kind::Float, Device::Cpu));
    assert!(error(vit.forward(&image)).contains("expected [batch, 3, 8, 8], got shape [1, 3, 8, 4]"));
    let long = Tensor::zeros([1, 6], (Kind::Int64, Device::Cpu));
    assert!(error(gpt2.forward(&long)).contains("at most 5"));
    let unknown = Tensor::from_slice2(&[[11i64, 0]]);
    assert!(error(gpt2.forward(&unknown)).contains("Embedding(11, 8)"));
    Ok(())
}

#[test]
fn the_head_of_gpt2_is_its_embedding_and_is_trained_once() -> Result<(), NnError> {
    let model = small_gpt2().build()?;
    let tied: Vec<_> = module_entries(&model).into_iter().filter(|(_, it)| it.size() == [11, 8]).collect();
    let names: Vec<_> = tied.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["transformer.wte.weight", "lm_head.weight"]);
    assert_eq!(tied[0].1.data_ptr(), tied[1].1.data_ptr());
    let parameters = model.named_parameters();
    assert_eq!(parameters.iter().filter(|it| it.tensor().size() == [11, 8]).count(), 1);
    Ok(())
}
