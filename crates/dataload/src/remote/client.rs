//! The client of stores: that of `object_store`, and it counts. Most requests are made again within that crate, so that
//! only a client sees all of them.

use futures_util::future::BoxFuture;
use http_body_util::{BodyExt, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
    ReqwestConnector,
};

use super::stats::{FAILED, FETCHED, REQUESTS, count};

/// The most bytes of an answer that is no part of a file: a page of a list has up to 5,000 files, with names of up to
/// 1,024 bytes.
const MAX_ANSWER: usize = 64 << 20;

#[derive(Debug)]
pub(super) struct Counting;

impl HttpConnector for Counting {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Counted(ReqwestConnector::default().connect(options)?)))
    }
}

#[derive(Debug)]
struct Counted(HttpClient);

impl HttpService for Counted {
    // What `async fn` in this trait stands for.
    fn call<'client, 'answer>(
        &'client self,
        request: HttpRequest,
    ) -> BoxFuture<'answer, Result<HttpResponse, HttpError>>
    where
        'client: 'answer,
        Self: 'answer,
    {
        Box::pin(async move {
            count(&REQUESTS, 1);
            let is_for_part = request.headers().contains_key("range");
            let answer = self.0.execute(request).await.inspect_err(|_| count(&FAILED, 1))?;
            let status = answer.status().as_u16();
            // Whoever asks for a part knows how long it is. All else is read to its end, which may never come.
            let most = if is_for_part && answer.status().is_success() { usize::MAX } else { MAX_ANSWER };
            if matches!(status, 408 | 429 | 500..) {
                count(&FAILED, 1);
            }
            let (head, body) = answer.into_parts();
            let body = body.map_err(|error| {
                count(&FAILED, 1);
                error
            });
            let body = body.map_frame(|frame| {
                count(&FETCHED, frame.data_ref().map_or(0, |bytes| bytes.len() as u64));
                frame
            });
            let body = Limited::new(body, most).map_err(|error| match error.downcast() {
                Ok(error) => *error,
                Err(error) => HttpError::new_boxed(HttpErrorKind::Decode, error),
            });
            Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body)))
        })
    }
}
