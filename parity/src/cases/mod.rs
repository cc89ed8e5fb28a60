//! One function per case, with the name of its Python half.

mod accum;
mod amp;
mod checkpoint;
mod closures;
mod compile;
mod dataload;
mod ddp;
mod ddp_collectives;
mod lr_finder;
mod memory;
mod metrics;
mod mnist;
mod nn;
mod nn_attention;
mod nn_autograd;
mod nn_files;
mod nn_models;
mod nn_sequences;
mod nn_summary;
mod optim;
mod packages;
mod profiler;
mod samplers;
mod sched;
mod sched_config;
mod swa;
mod trajectories;

use anyhow::Result;

pub use ddp::other_rank;

use crate::record::{Found, Given};

/// Computes a case's results from Python's inputs.
pub type Case = fn(&Given<'_>) -> Result<Found>;

/// Every case by name.
pub const ALL: &[(&str, Case)] = &[
    ("autocast_dtypes", amp::autocast_dtypes),
    ("grad_scaler_histories", amp::grad_scaler_histories),
    ("accumulation_is_the_large_batch", accum::accumulation_is_the_large_batch),
    ("gradient_noise_scale", accum::gradient_noise_scale),
    ("grid_adam", trajectories::adam),
    ("grid_adamw", trajectories::adamw),
    ("grid_sgd", trajectories::sgd),
    ("grid_rmsprop", trajectories::rmsprop),
    ("grid_adagrad", trajectories::adagrad),
    ("grid_adafactor", trajectories::adafactor),
    ("grid_muon", trajectories::muon),
    ("grid_adadelta", trajectories::adadelta),
    ("grid_adamax", trajectories::adamax),
    ("grid_asgd", trajectories::asgd),
    ("grid_nadam", trajectories::nadam),
    ("grid_radam", trajectories::radam),
    ("grid_rprop", trajectories::rprop),
    ("grid_sparse_adam", trajectories::sparse_adam),
    ("paper_lion", trajectories::lion),
    ("paper_lamb", trajectories::lamb),
    ("paper_lars", trajectories::lars),
    ("paper_asam", closures::asam),
    ("lbfgs_rosenbrock", closures::rosenbrock),
    ("lbfgs_network", closures::network),
    ("schedule_free_sgd", packages::schedule_free_sgd),
    ("schedule_free_adamw", packages::schedule_free_adamw),
    ("prodigy_options", packages::prodigy),
    ("swa_update_bn", swa::update),
    ("timm_lamb", trajectories::timm_lamb),
    ("timm_lars", trajectories::timm_lars),
    ("timm_adafactor", trajectories::timm_adafactor),
    ("clip_grad_norm", optim::clip_grad_norm),
    ("clip_grad_value", optim::clip_grad_value),
    ("adafactor_nan", optim::adafactor_nan),
    ("averaged_model", optim::averaged_model),
    ("export_pt", checkpoint::export_pt),
    ("ddp_training", ddp::ddp_training),
    ("ddp_training_of_more", ddp::ddp_training_of_more),
    ("ddp_beside_python", ddp::ddp_beside_python),
    ("ddp_collectives", ddp::ddp_collectives),
    ("compiled_steps", compile::compiled_steps),
    ("activation_checkpointing", memory::activation_checkpointing),
    ("saved_tensors_hooks", memory::saved_tensors_hooks),
    ("mnist_cnn_losses", mnist::mnist_cnn_losses),
    ("metrics_meters", metrics::meters),
    ("nn_layers", nn::layers),
    ("nn_init", nn::init),
    ("nn_embeddings", nn_sequences::embeddings),
    ("nn_bilinear", nn_sequences::bilinear),
    ("nn_recurrent", nn_sequences::recurrent),
    ("nn_attention", nn_attention::attention),
    ("nn_transformer", nn_attention::transformer),
    ("nn_model_resnet", nn_models::resnet),
    ("nn_model_mobilenet_v2", nn_models::mobilenet_v2),
    ("nn_model_efficientnet_b0", nn_models::efficientnet_b0),
    ("nn_model_vit_b_16", nn_models::vit_b_16),
    ("nn_model_gpt2", nn_models::gpt2),
    ("nn_pt_files", nn_files::pt_files),
    ("nn_pt_refused", nn_files::pt_refused),
    ("nn_load_state_dict", nn_files::load_state_dict),
    ("nn_safetensors", nn_files::safetensors),
    ("nn_summary", nn_summary::summaries),
    ("nn_autograd", nn_autograd::nn_autograd),
    ("dataload_jpeg", dataload::dataload_jpeg),
    ("dataload_resized_crop", dataload::dataload_resized_crop),
    ("dataload_dct_scaling", dataload::dataload_dct_scaling),
    ("dataload_exif", dataload::dataload_exif),
    ("dataload_evaluation", dataload::dataload_evaluation),
    ("dataload_color_jitter", dataload::dataload_color_jitter),
    ("dataload_mix", dataload::dataload_mix),
    ("profile_key_averages", profiler::key_averages),
    ("profile_schedules", profiler::schedules),
    ("profile_tables", profiler::tables),
    ("profile_traces", profiler::traces),
    ("sampler_distributed", samplers::sampler_distributed),
    ("sampler_batches", samplers::sampler_batches),
    ("sampler_random", samplers::sampler_random),
    ("sampler_weighted", samplers::sampler_weighted),
    ("sampler_torch_order", samplers::sampler_torch_order),
    ("collate_stack", samplers::collate_stack),
    ("sched_lambda_lr", sched::trajectories),
    ("sched_multiplicative_lr", sched::trajectories),
    ("sched_step_lr", sched::trajectories),
    ("sched_multi_step_lr", sched::trajectories),
    ("sched_constant_lr", sched::trajectories),
    ("sched_linear_lr", sched::trajectories),
    ("sched_exponential_lr", sched::trajectories),
    ("sched_polynomial_lr", sched::trajectories),
    ("sched_cosine_annealing_lr", sched::trajectories),
    ("sched_cosine_annealing_warm_restarts", sched::trajectories),
    ("sched_cyclic_lr", sched::trajectories),
    ("sched_one_cycle_lr", sched::trajectories),
    ("sched_reduce_lr_on_plateau", sched::plateaus),
    ("sched_sequential_lr", sched::trajectories),
    ("sched_chained_scheduler", sched::trajectories),
    ("sched_nested", sched::trajectories),
    ("sched_warmup_cosine_lr", sched::trajectories),
    ("sched_warmup_stable_decay_lr", sched::trajectories),
    ("sched_inverse_sqrt_lr", sched::trajectories),
    ("sched_noam_lr", sched::trajectories),
    ("sched_swa_lr", sched::trajectories),
    ("sched_layer_wise", sched::layer_wise),
    ("sched_lr_finder", lr_finder::lr_finder),
    ("sched_warm_restarts_between_steps", sched::between_steps),
];
