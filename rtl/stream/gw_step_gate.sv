// Decides when a step of a packet can be taken, and what is wrong with it.
//
// A step says: the packet goes on with `need` bytes, of which one item is made. It is taken when
// the window shows 34 bytes or the packet's end, so that every fault is known. A fault ends the
// packet that is being made with an empty item that has a reason; the rest of the packet that came
// is dropped.
module gw_step_gate (
    input logic clk,
    input logic rst,

    // The window.
    input  logic [271:0] bytes,
    input  logic [  5:0] available,
    input  logic         ended,
    input  logic         broken,
    input  logic         settled,
    output logic         advance,
    output logic         take_all,

    // The step.
    input  logic [5:0] need,
    input  logic       last,         // the packet should end with this step
    input  logic       padding,      // zeros may follow the last step
    input  logic [2:0] step_reason,  // a fault that only the engine sees, or 0
    output logic       taken,        // the step, or the packet with it, is done

    // The item.
    output logic       item_last,
    output logic [2:0] item_reason,  // README.md lists them; 0: none
    output logic       item_valid,
    input  logic       item_ready
);
    logic dropping;

    wire cut_off = available < need || (ended && available == need && !last);
    logic rest_is_zero;
    always_comb begin
        rest_is_zero = 1'b1;
        for (int i = 0; i < 34; i++) begin
            if (i[5:0] >= need && i[5:0] < available && bytes[8*i+:8] != 8'd0) rest_is_zero = 1'b0;
        end
    end
    wire too_long = last && (!ended || available != need) && !(ended && padding && rest_is_zero);

    always_comb begin
        if (broken) item_reason = 3'd1;
        else if (step_reason != 3'd0) item_reason = step_reason;
        else if (cut_off) item_reason = 3'd2;
        else if (too_long) item_reason = 3'd3;
        else item_reason = 3'd0;
    end
    wire fault = item_reason != 3'd0;

    assign item_valid = settled && !dropping;
    assign item_last  = last || fault;
    assign taken      = item_valid && item_ready;
    assign advance    = taken || (settled && dropping);

    // A last step with bytes left over needs no case of its own: all are taken.
    assign take_all = dropping || last || broken || step_reason != 3'd0 || available < need
        || (available == need && ended);

    always_ff @(posedge clk) begin
        if (rst) dropping <= 1'b0;
        else if (advance) dropping <= (fault || dropping) && !ended;
    end
endmodule
