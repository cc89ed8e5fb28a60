//! `#[derive(Module)]` of `overdrive-nn`.
#![forbid(unsafe_code)]

use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::{Span, TokenStream};
use quote::quote;
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Error, Fields, Ident, Index, Member, parse_macro_input};

/// Implements `Module` and `Stateful`: the fields are parts of the module, under their names, in the order in which they
/// are declared. Fields can be modules, parameters, buffers, plain values, `Cell`s of plain values, and `Option`s of all
/// these. `#[module(skip)]` leaves a field of another type out.
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    module(&input).unwrap_or_else(Error::into_compile_error).into()
}

fn module(input: &DeriveInput) -> Result<TokenStream, Error> {
    let Data::Struct(data) = &input.data else {
        let message = "`Module` can be derived for structs; for an enum, implement `Module::visit` by a `match`";
        return Err(Error::new(input.span(), message));
    };
    let krate = nn();
    let mut shown = Vec::new();
    for (member, name) in members(&data.fields) {
        let field = data.fields.iter().nth(shown.len()).map(|field| &field.attrs);
        shown.push(match is_skipped(field.map_or(&[], Vec::as_slice))? {
            true => quote! {},
            false => quote! { #krate::Part::show(&self.#member, #name, visitor); },
        });
    }
    let described = option(&input.attrs, "describe")?.then(|| {
        quote! {
            fn describe(&self) -> ::std::string::String {
                Self::describe(self)
            }
        }
    });
    // A module that borrows cannot be told apart by type.
    let as_any = input.generics.lifetimes().next().is_none().then(|| {
        quote! {
            fn as_any(&self) -> ::std::option::Option<&dyn ::std::any::Any> {
                ::std::option::Option::Some(self)
            }
        }
    });
    let mut all = input.generics.clone();
    if as_any.is_some() {
        all.type_params_mut().for_each(|parameter| parameter.bounds.push(syn::parse_quote!('static)));
    }
    let (name, (generics, types, bounds)) = (&input.ident, all.split_for_impl());
    Ok(quote! {
        impl #generics #krate::Module for #name #types #bounds {
            #[allow(unused_variables)]
            fn visit<'module>(&'module self, visitor: &mut dyn #krate::Visitor<'module>) {
                #(#shown)*
            }

            #described

            #as_any
        }

        impl #generics #krate::Stateful for #name #types #bounds {
            fn state_dict(&self) -> ::std::result::Result<#krate::StateDict, #krate::StateError> {
                #krate::module_state(self)
            }

            fn load_state_dict(
                &mut self,
                state: &#krate::StateDict,
            ) -> ::std::result::Result<(), #krate::StateError> {
                #krate::load_module_state(self, state)
            }
        }
    })
}

/// How each field is written in code, and its name in the model.
fn members(fields: &Fields) -> Vec<(Member, String)> {
    let member = |(index, field): (usize, &syn::Field)| match &field.ident {
        Some(name) => {
            let text = name.to_string();
            // `r#type` is `type` in the model.
            (Member::Named(name.clone()), text.strip_prefix("r#").unwrap_or(&text).to_owned())
        }
        None => (Member::Unnamed(Index::from(index)), index.to_string()),
    };
    fields.iter().enumerate().map(member).collect()
}

fn is_skipped(attributes: &[syn::Attribute]) -> Result<bool, Error> {
    option(attributes, "skip")
}

/// Whether an attribute `#[module(..)]` has an option.
fn option(attributes: &[syn::Attribute], wanted: &str) -> Result<bool, Error> {
    let mut found = false;
    for attribute in attributes.iter().filter(|it| it.path().is_ident("module")) {
        attribute.parse_nested_meta(|meta| match meta.path.is_ident(wanted) {
            true => {
                found = true;
                Ok(())
            }
            false => Err(meta.error(format!("only `#[module({wanted})]` is known here"))),
        })?;
    }
    Ok(found)
}

/// The path of `overdrive-nn`, or of the facade that re-exports it.
fn nn() -> TokenStream {
    let path = |found: FoundCrate, own: &str| {
        let name = match found {
            FoundCrate::Itself => own.to_owned(),
            FoundCrate::Name(name) => name,
        };
        let name = Ident::new(&name, Span::call_site());
        quote! { ::#name }
    };
    if let Ok(found) = crate_name("overdrive-nn") {
        return path(found, "overdrive_nn");
    }
    match crate_name("overdrive") {
        Ok(found) => {
            let facade = path(found, "overdrive");
            quote! { #facade::nn }
        }
        Err(_) => quote! { ::overdrive_nn },
    }
}
