// What is done once for each row, around the kernels: from their statistics to what a caller keeps, and from what comes
// in to what a backward knows of a row. The sink lives here alone: no kernel sees it.
#pragma once

#include <vector>

#include "attention.h"
#include "border.h"

namespace attnscore {

// After a forward: top and log_total = log sum exp(s - top), the sink among them (-inf where a row sees nothing);
// `out` becomes the share of the keys.
void finish_forward(const Problem& problem, const std::vector<HeadRows>& rows, int threads);

// Before a backward: log_total (+inf where nothing is seen) and shift of each row. Holds them until the backward is
// done.
class BackwardRows {
   public:
    BackwardRows(Problem& problem, const std::vector<HeadRows>& rows, int threads);

   private:
    std::vector<char> numbers_;
};

// After it: the sink is a logit without a value, so its dp is the shift alone.
void set_sink_gradients(const Problem& problem, const std::vector<HeadRows>& rows);

}  // namespace attnscore
